"""The order of events in a pipeline: who computes which micro-batch when, and who waits for whom.

Each rank runs its passes in the order of the real schedule. A pass begins when the rank has ended
the one before and what it needs of another stage has arrived.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from megatron_zpp.parallel.pipeline_schedule import Pass, passes
from megatron_zpp.planner.timing.timeline import Streams, UnitWork

FILLED = 4  # groups of P micro-batches, after which each further group takes as long as the last


@dataclass(frozen=True, kw_only=True)
class PassSeconds:
    """Seconds of the passes of a stage: of the first micro-batch, of others, of the last.

    tail: what its last reductions take after the last pass. onward, back: what its activations and
    their gradients take to another stage.
    """

    first_forward: float
    forward: float
    backward: float
    last_backward: float
    tail: float
    onward: float = 0.0
    back: float = 0.0

    def of(self, each: Pass, num_micro_batches: int) -> float:
        """Return the seconds of a pass."""
        if each.is_forward:
            return self.forward if each.micro_batch else self.first_forward
        is_last = each.micro_batch == num_micro_batches - 1
        return self.last_backward if is_last else self.backward

    def busy(self, num_micro_batches: int) -> float:
        """Return the seconds of all passes of a step."""
        others = (num_micro_batches - 1) * (self.forward + self.backward)
        return self.first_forward + others + self.last_backward + self.tail


def pass_seconds(
    kind: Callable[..., Streams],
    blocks: Sequence[UnitWork],
    root: UnitWork,
    onward: float,
    back: float,
) -> PassSeconds:
    """Return the seconds of a stage's passes, one forward and one backward in turn."""
    streams = kind(blocks, root)
    ends = [streams.now]
    for index in range(3):
        streams.forward(is_first=index == 0)
        ends.append(streams.now)
        streams.backward(is_last=index == 2)
        ends.append(streams.now)
    streams.finish()
    first, _, forward, backward, _, last = (end - start for start, end in pairwise(ends))
    return PassSeconds(
        first_forward=first,
        forward=forward,
        backward=backward,
        last_backward=last,
        tail=streams.now - ends[-1],
        onward=onward,
        back=back,
    )


def pipeline_seconds(stages: Sequence[PassSeconds], size: int, num_micro_batches: int) -> float:
    """Return the seconds of a step without its update, of stages that `size` ranks share out.

    Stage i is on rank i modulo `size`. Groups of micro-batches that repeat are not simulated.
    """
    filled = FILLED * size
    if num_micro_batches <= filled + size:
        return _Schedule(stages, size, num_micro_batches).run()
    fewer, more = (_Schedule(stages, size, count).run() for count in (filled, filled + size))
    return more + (num_micro_batches - filled - size) * (more - fewer) / size


class _Schedule:
    """Simulates the passes of all ranks of a pipeline."""

    def __init__(self, stages: Sequence[PassSeconds], size: int, num_micro_batches: int) -> None:
        self._stages, self._size, self._count = stages, size, num_micro_batches
        self._now = [0.0] * size
        self._links: dict[tuple[int, bool], float] = {}  # when a rank's link onward or back is free
        self._arrivals: dict[tuple[bool, int, int], float] = {}  # direction, stage, micro-batch
        chunks = len(stages) // size
        self._orders = [passes(rank, size, num_micro_batches, chunks) for rank in range(size)]
        self._next = [0] * size

    def run(self) -> float:
        """Return when the last rank has ended, with its reductions."""
        remaining = sum(map(len, self._orders))
        while remaining:
            before = remaining
            for rank in range(self._size):
                remaining -= self._advance(rank)
            assert remaining < before, "each pass waits for another one"
        return max(
            now + max(stage.tail for stage in self._stages[rank :: self._size])
            for rank, now in enumerate(self._now)
        )

    def _advance(self, rank: int) -> int:
        """Run the passes of a rank for which all has arrived; return how many."""
        order, first = self._orders[rank], self._next[rank]
        while self._next[rank] < len(order):
            each = order[self._next[rank]]
            arrival = self._arrival(rank, each)
            if arrival is None:
                break
            stage = rank + each.chunk * self._size
            seconds = self._stages[stage].of(each, self._count)
            self._now[rank] = max(self._now[rank], arrival) + seconds
            self._send(rank, stage, each)
            self._next[rank] += 1
        return self._next[rank] - first

    def _arrival(self, rank: int, each: Pass) -> float | None:
        """Return when a pass has what it needs of another stage; None if that has not run."""
        stage = rank + each.chunk * self._size
        is_end = stage == (0 if each.is_forward else len(self._stages) - 1)
        if is_end:
            return 0.0
        return self._arrivals.get((each.is_forward, stage, each.micro_batch))

    def _send(self, rank: int, stage: int, each: Pass) -> None:
        following = stage + (1 if each.is_forward else -1)
        if not 0 <= following < len(self._stages):
            return
        sender = self._stages[stage]
        link = rank, each.is_forward
        start = max(self._now[rank], self._links.get(link, 0.0))
        self._links[link] = start + (sender.onward if each.is_forward else sender.back)
        self._arrivals[each.is_forward, following, each.micro_batch] = self._links[link]
