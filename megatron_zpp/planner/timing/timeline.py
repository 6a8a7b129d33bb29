"""The order of events of a step: who waits for whom.

The processor computes; near and far links carry messages, each one at a time. Units are gathered
ahead of their use and reduced beside the computation of others, in the order of FSDP2 on a GPU.
The kernels of collectives take a share of the processor, which computes so much slower meanwhile.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron_zpp.planner.timing.links import HopTime

KEPT = 8  # messages of a link; those before them have ended
SIMULATED = 3  # micro-batches: the first, one between, the last


@dataclass(frozen=True)
class Collective:
    """The hops of a collective, one after the other, and seconds of kernels on the processor.

    The kernels of a gather follow it; those of a reduction precede it.
    """

    hops: tuple[HopTime, ...] = ()
    kernels: float = 0.0


NONE = Collective()


@dataclass(frozen=True, kw_only=True)
class UnitWork:
    """What a step does with a unit; seconds of computing, and its collectives.

    backward: recomputation included. Collectives that do not take place are `NONE`.
    """

    forward: float
    backward: float
    first_gather: Collective = NONE
    later_gather: Collective = NONE
    backward_gather: Collective = NONE
    reduction: Collective = NONE  # in the last micro-batch
    early_reduction: Collective = NONE  # in the others


class Link:
    """Carries one message at a time; a message may use a gap before those that wait for others."""

    def __init__(self) -> None:
        self.busy: list[tuple[float, float]] = []  # when the last ones begin and end, ascending

    def free_from(self, ready: float, seconds: float) -> float:
        """Return when a message that is ready can start."""
        start = ready
        for begin, end in self.busy:
            if start + seconds <= begin:
                return start
            if end > start:  # `max` takes three times as long
                start = end
        return start

    def occupy(self, start: float, seconds: float) -> None:
        self.busy.append((start, start + seconds))
        self.busy.sort()
        del self.busy[:-KEPT]


class Streams:
    """Simulates a step on a GPU: collectives run beside the computation, on streams of their own.

    While a unit computes, the next one is gathered, in backward the one before. A unit's reduction
    begins when the one before it has ended (FSDP2 frees its buffer then).
    """

    forward_ahead = 1
    backward_ahead = 1

    def __init__(
        self, blocks: Sequence[UnitWork], root: UnitWork, sending_share: float = 0.0
    ) -> None:
        self.blocks, self.root, self.sending_share = blocks, root, sending_share
        self.now = 0.0  # when the processor is free
        self.near, self.far = Link(), Link()
        self._gather_stream = 0.0
        self._reduced = 0.0  # end of the last reduction
        self._arrivals: dict[int, tuple[float, Collective]] = {}  # by unit

    def run(self, num_micro_batches: int) -> float:
        """Return the seconds of a step without its update."""
        for index in range(num_micro_batches):
            self.forward(is_first=index == 0)
            self.backward(is_last=index == num_micro_batches - 1)
        self.finish()
        return self.now

    def forward(self, *, is_first: bool) -> None:
        """Run a forward pass."""
        units = [*self.blocks, self.root]
        gathers = [unit.first_gather if is_first else unit.later_gather for unit in units]
        root = len(self.blocks)
        self._issue(root, gathers[root])
        self._use(root, gathers[root])
        for index, block in enumerate(self.blocks):
            self._issue(index, gathers[index])
            self._use(index, gathers[index])
            for ahead in range(index + 1, min(index + 1 + self.forward_ahead, root)):
                self._issue(ahead, gathers[ahead])
            self._compute(block.forward)
        self._compute(self.root.forward)

    def backward(self, *, is_last: bool) -> None:
        """Run a backward pass."""
        self._compute(self.root.backward)
        for index in reversed(range(len(self.blocks))):
            block = self.blocks[index]
            self._issue(index, block.backward_gather)
            self._use(index, block.backward_gather)
            for ahead in range(index - 1, max(-1, index - 1 - self.backward_ahead), -1):
                self._issue(ahead, self.blocks[ahead].backward_gather)
            self._compute(block.backward)
            self._reduce(block.reduction if is_last else block.early_reduction)
        self._reduce(self.root.reduction if is_last else self.root.early_reduction)

    def _compute(self, seconds: float) -> None:
        """Compute what takes so many seconds on the whole processor, beside messages."""
        rate = 1 - self.sending_share
        busy = (*self.near.busy, *self.far.busy) if rate < 1 else ()
        for begin, end in sorted(each for each in busy if each[1] > self.now):
            begin = max(begin, self.now)
            if begin >= end:
                continue
            if seconds <= begin - self.now:
                break
            seconds -= begin - self.now
            beside = min(end - begin, seconds / rate)
            self.now, seconds = begin + beside, seconds - beside * rate
        self.now += seconds

    def _issue(self, unit: int, gather: Collective) -> None:
        """Start a gather, unless it has been started."""
        if unit not in self._arrivals and gather.hops:
            start = max(self.now, self._gather_stream)
            self._gather_stream = self._send(gather.hops, start)
            self._arrivals[unit] = self._gather_stream, gather

    def _use(self, unit: int, gather: Collective) -> None:
        """Wait for a gather."""
        if unit in self._arrivals:
            arrival, _ = self._arrivals.pop(unit)
            self.now = max(self.now, arrival)
        self.now += gather.kernels

    def _reduce(self, reduction: Collective) -> None:
        """Reduce gradients, after the reduction before."""
        if not (reduction.hops or reduction.kernels):
            return
        self.now = max(self.now, self._reduced) + reduction.kernels
        self._reduced = self._send(reduction.hops, self.now)

    def finish(self) -> None:
        """Wait for the last reductions."""
        self.now = max(self.now, self._reduced)

    def _send(self, hops: Sequence[HopTime], ready: float) -> float:
        """Occupy the links with hops one after the other; return when the last one ends."""
        for hop in hops:
            ready = self._start(hop, ready) + hop.seconds
        return ready

    def _start(self, hop: HopTime, ready: float) -> float:
        start, last = ready, None
        while start != last:  # both links must be free
            last = start
            if hop.near:
                start = self.near.free_from(start, hop.near)
            if hop.far:
                start = self.far.free_from(start, hop.far)
        if hop.near:
            self.near.occupy(start, hop.near)
        if hop.far:
            self.far.occupy(start, hop.far)
        return start


def step_seconds(start: Callable[[], Streams], num_micro_batches: int) -> float:
    """Return the seconds of a step of so many micro-batches, of which equal ones count once."""
    if num_micro_batches <= SIMULATED:
        return start().run(num_micro_batches)
    fewer, all_kinds = (start().run(count) for count in (SIMULATED - 1, SIMULATED))
    return all_kinds + (num_micro_batches - SIMULATED) * (all_kinds - fewer)
