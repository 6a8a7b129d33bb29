"""Local SGD: each replica trains independently, and an outer step follows every `sync_every` steps.

    n inner steps  ->  pseudo-gradient: global parameters - own  ->  mean over replicas
                   ->  Nesterov  ->  new global parameters, with which all replicas go on

With fragments the weights take turns, and with a delay replicas train on during an exchange, so
there may be no moment at which all replicas have equal weights; the global parameters always are.

Sources: Local SGD (Stich 2019); those of `fragment.py`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from zeropp.capabilities.local_sgd.averaged_buffers import OUTER, AveragedBuffers
from zeropp.capabilities.local_sgd.fragment import Fragment, OuterOptions, fragments_of
from zeropp.capabilities.local_sgd.outer_group import OuterGroup
from zeropp.capabilities.local_sgd.sync_schedule import SyncSchedule
from zeropp.capabilities.local_sgd.trained_weights import TrainedWeights
from zeropp.errors import InputError
from zeropp.settings.sections import Zeropp

ALIKE, ALONE = f"{OUTER}alike", f"{OUTER}alone"


@dataclass(kw_only=True)
class LocalSteps:
    """What a replica does beside its inner steps, which are numbered from 1.

    `is_alike`: all replicas have the same weights; their moments differ with `has_stepped_alone`.
    """

    weights: TrainedWeights
    group: OuterGroup
    schedule: SyncSchedule
    options: OuterOptions = OuterOptions()
    fragments: list[Fragment] = field(init=False)
    buffers: AveragedBuffers = field(init=False)
    is_alike: bool = field(init=False, default=True)
    has_stepped_alone: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        self._cut()

    def _cut(self) -> None:
        """Divide the model's weights and buffers into fragments."""
        self.fragments = [
            Fragment(
                number=number,
                weights=replace(self.weights, names=names),
                group=self.group,
                options=self.options,
            )
            for number, names in enumerate(
                fragments_of(self.weights.model, self.schedule.fragments)
            )
            if names
        ]
        self.buffers = AveragedBuffers(
            model=self.weights.model, group=self.group, number=self.schedule.fragments - 1
        )

    @property
    def parts(self) -> list[Fragment | AveragedBuffers]:
        """What this rank synchronizes."""
        return [*self.fragments, self.buffers]

    @classmethod
    def of(cls, settings: Zeropp, weights: TrainedWeights, group: OuterGroup) -> "LocalSteps":
        """Return those of a section `zeropp` of the JSON."""
        return cls(
            weights=weights,
            group=group,
            schedule=SyncSchedule.of(
                settings.sync_every, settings.sync_fragments, settings.sync_delay
            ),
            options=OuterOptions(
                bits=settings.sync_bits,
                feedback=settings.sync_feedback,
                lr=settings.outer_lr,
                momentum=settings.outer_momentum,
                on_host=settings.sync_on_host,
                mixing=settings.sync_mixing,
            ),
        )

    def before_update(self, step: int) -> None:
        """Average gradients and buffers over replicas in a step that all take together.

        Raises InputError if they have trained independently before.
        """
        if self.schedule.averages_gradients(step):
            if self.has_stepped_alone:  # in a run that goes on with other intervals
                raise InputError(
                    f"zeropp.sync_every = 1 in step {step} averages gradients, but the nodes have "
                    "trained independently before it, and their optimizers' moments differ: set an "
                    "interval above 1, or go on without the optimizer's state"
                )
            self._average_gradients()

    def after_update(self, step: int, *, is_last: bool = False) -> None:
        """Take the outer steps that are due after a step.

        After the last one, exchanges under way end, and all weights are synchronized at once.
        """
        schedule = self.schedule
        if schedule.averages_gradients(step):
            self.buffers.agree()
            for each in self.fragments:
                each.agree()
                if not schedule.averages_gradients(step + 1):
                    each.mean.forget()  # those were errors of gradients
            self.is_alike = True
            return
        self.is_alike, self.has_stepped_alone = False, True
        numbers = range(schedule.fragments)
        due = [number for number in numbers if is_last or schedule.is_due(step, number)]
        self._exchange(due, step, 0 if is_last else schedule.delay)

    def synchronize(self, step: int) -> None:
        """Give all replicas the same weights after a step, if they have not."""
        if not self.is_alike:
            self._exchange(range(self.schedule.fragments), step, 0)

    def sum(self, values_of: Callable[[int, int], Sequence[float]]) -> list[float]:
        """Return the sums over all replicas, which call it, of `values_of(index, count)`."""
        return self.group.sum(*values_of(self.group.node, self.group.size))

    def meets(self, step: int) -> bool:
        """Whether all replicas are at the same step after it, as they wait for each other."""
        return self.schedule.meets(step)

    def state(self) -> dict[str, Tensor]:
        """Return what a checkpoint holds of this replica, by name, sharded as the weights are.

        Waits for exchanges under way. A run resumed from here computes the same digits.
        """
        state = {
            ALIKE: torch.tensor(self.is_alike),
            ALONE: torch.tensor(self.has_stepped_alone),
        }
        for each in self.parts:
            state |= each.state()
        return state

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Go on from what `state` has returned, read from a checkpoint of as many replicas."""
        for each in self.parts:
            each.load(state)
        self.is_alike, self.has_stepped_alone = bool(state[ALIKE]), bool(state[ALONE])

    def exchange_also(self, weights: TrainedWeights) -> None:
        """Synchronize these weights from now on; some may be new, the others keep their state.

        Waits for exchanges under way. All replicas call it between the same outer steps.
        """
        known, state = self.weights.named, self.state()
        new = (name for name, each in weights.named.items() if known.get(name) is not each)
        begins = tuple(f"{OUTER}{name}." for name in new)
        self.weights = weights
        self._cut()
        kept = {name: each for name, each in state.items() if not name.startswith(begins)}
        self.load(self.state() | kept)

    def end_delay(self) -> None:
        """Merge now what would be merged after a later step, as when the iteration is reset."""
        for each in self.parts:
            if each.merges_at:
                each.merge(self.options.mixing)

    def restart(self) -> None:
        """Reset the outer optimizer; the weights are the same on all replicas."""
        self.buffers.agree()
        for each in self.fragments:
            each.restart()
        self.is_alike, self.has_stepped_alone = True, False

    def restart_from_agreed(self) -> None:
        """Go on from the global parameters."""
        for each in self.parts:
            each.merge(0.0)
        self.restart()

    def expected_traffic(self, step: int) -> Mapping[tuple[str, str], float]:
        """Return the bytes, before coding, that this rank sends per step, by (purpose, hop)."""
        size = sum(each.mean.message_bytes for each in self.fragments)
        size += len(self.buffers.message()) * (self.group.size - 1)
        return {("outer", "across_nodes"): size / self.schedule.interval(step)}

    def _average_gradients(self) -> None:
        for each in self.fragments:
            each.average_gradients()
        self.buffers.average()

    def _exchange(self, due: Sequence[int], step: int, delay: int) -> None:
        """Merge the exchanges that end after a step, and start those of the fragments `due`.

        On this rank, some of these may have no weights.
        """
        here = [each for each in self.parts if each.number in due]
        for each in self.parts:
            if each.merges_at and (each.merges_at == step or each in here):
                each.merge(self.options.mixing)
        for each in here:
            each.start(step + delay)
        if not delay:
            for each in here:
                each.merge(0.0)
            self.is_alike = len(due) == self.schedule.fragments
