"""The order of events in a pipeline: who computes which micro-batch when, and who waits for whom.

Each rank runs its passes in the order of the real schedule. A pass begins when the rank has ended
the one before and what it needs of another stage has arrived.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

from megatron_zpp.parallel.pipeline_schedule import Pass, passes
from megatron_zpp.planner.timing.timeline import Streams

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


def pass_seconds(streams: Streams, onward: float, back: float) -> PassSeconds:
    """Return the seconds of a stage's passes, one forward and one backward in turn."""
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
        return simulated_seconds(stages, size, num_micro_batches)
    fewer, more = (simulated_seconds(stages, size, count) for count in (filled, filled + size))
    return more + (num_micro_batches - filled - size) * (more - fewer) / size


@cache
def _order(size: int, chunks: int, num_micro_batches: int) -> tuple[tuple[int, int, Pass], ...]:
    """Return (rank, stage, pass) of all passes of a step, each behind those that it waits for."""
    orders = [passes(rank, size, num_micro_batches, chunks) for rank in range(size)]
    order: list[tuple[int, int, Pass]] = []
    arrived: set[tuple[bool, int, int]] = set()  # direction, stage, micro-batch
    remaining = [*map(iter, orders)]
    waiting = [*map(next, remaining)]
    while any(waiting):
        before = len(order)
        for rank, left in enumerate(remaining):
            while (each := waiting[rank]) is not None:
                stage, step = rank + each.chunk * size, 1 if each.is_forward else -1
                is_end = stage == (0 if each.is_forward else size * chunks - 1)
                if not is_end and (each.is_forward, stage, each.micro_batch) not in arrived:
                    break
                order.append((rank, stage, each))
                arrived.add((each.is_forward, stage + step, each.micro_batch))
                waiting[rank] = next(left, None)
        assert len(order) > before, "each pass waits for another one"
    return tuple(order)


def simulated_seconds(stages: Sequence[PassSeconds], size: int, num_micro_batches: int) -> float:
    """Return when the last rank has ended, with its reductions."""
    now = [0.0] * size
    links: dict[tuple[int, bool], float] = {}  # when a rank's link onward or back is free
    arrivals: dict[tuple[bool, int, int], float] = {}  # direction, stage, micro-batch
    for rank, stage, each in _order(size, len(stages) // size, num_micro_batches):
        forward, own = each.is_forward, stages[stage]
        arrival = arrivals.get((forward, stage, each.micro_batch), 0.0)
        begin = now[rank]
        if arrival > begin:  # `max` takes three times as long
            begin = arrival
        now[rank] = end = begin + own.of(each, num_micro_batches)
        following = stage + (1 if forward else -1)
        if 0 <= following < len(stages):
            free = links.get((rank, forward), 0.0)
            if free > end:
                end = free
            end += own.onward if forward else own.back
            links[rank, forward] = arrivals[forward, following, each.micro_batch] = end
    return max(
        end + max(stage.tail for stage in stages[rank::size]) for rank, end in enumerate(now)
    )
