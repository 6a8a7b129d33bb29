"""The intervals between outer steps: one number, or one for each phase."""

from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property

from zeropp.settings.json_keys import Phases


@dataclass(frozen=True)
class SyncSchedule:
    """When fragments are synchronized. Steps are numbered from 1.

    In an interval of H steps the `fragments` of the weights take turns, one every H / fragments
    steps. An exchange ends `delay` steps after it began.
    """

    phases: Phases
    fragments: int = 1
    delay: int = 0

    @classmethod
    def of(cls, sync_every: int | Phases, fragments: int = 1, delay: int = 0) -> "SyncSchedule":
        """Return the schedule of a value of `zeropp.sync_every`."""
        phases = sync_every if isinstance(sync_every, tuple) else ((0, sync_every),)
        return cls(phases, fragments, delay)

    def __str__(self) -> str:
        parts = []
        for start, interval in self.phases:
            how = "every step" if interval == 1 else f"every {interval} steps"
            parts.append(f"{how} after step {start:,}" if start else how)
        if self.fragments > 1:
            parts.append(f"{self.fragments} fragments in turn")
        if self.delay:
            parts.append(f"beside {self.delay} further steps")
        return ", ".join(parts)

    @property
    def is_plain(self) -> bool:
        """Whether all replicas take every step together, as one data axis."""
        return self.phases == ((0, 1),)

    @property
    def last_interval(self) -> int:
        """The interval of the last phase, the largest."""
        return self.phases[-1][1]

    def interval(self, step: int) -> int:
        """Return the interval of the phase that a step belongs to."""
        return self.phases[self._phase(step)][1]

    def averages_gradients(self, step: int) -> bool:
        """Whether replicas average the gradients of a step, so that they stay equal."""
        return self.interval(step) == 1

    def is_due(self, step: int, fragment: int) -> bool:
        """Whether an exchange of a fragment, numbered from 0, begins after a step.

        That of the last one does so at the end of an interval, and all do at the end of a phase.
        """
        if step < 1 or self.averages_gradients(step):
            return False
        start, interval = self.phases[self._phase(step)]
        offset = -(-(fragment + 1) * interval // self.fragments)  # 1 to interval
        return (step - start - offset) % interval == 0 or step in self._starts

    def meets(self, step: int) -> bool:
        """Whether replicas are at the same step after it, as they have waited for each other.

        That is once in an interval, at the end of the last fragment's exchange.
        """
        return self.averages_gradients(step) or self.is_due(step - self.delay, self.fragments - 1)

    @cached_property
    def _starts(self) -> tuple[int, ...]:
        return tuple(start for start, _ in self.phases)

    def _phase(self, step: int) -> int:
        return bisect_right(self._starts, max(step - 1, 0)) - 1
