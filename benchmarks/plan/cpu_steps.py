"""The order of events of a step on CPUs, where callers run the hops of their collectives."""

from collections.abc import Sequence

from megatron_zpp.planner.timing.links import HopTime
from megatron_zpp.planner.timing.timeline import Collective, Streams, UnitWork
from zeropp.fsdp_adapter import AHEAD


class Blocking(Streams):
    """Simulates a step whose collectives the processor waits for, as plain FSDP2's under gloo."""

    forward_ahead = 0
    backward_ahead = 0

    def _reduce(self, reduction: Collective) -> None:
        super()._reduce(reduction)
        self.now = max(self.now, self._reduced)


class Host(Streams):
    """Simulates a step with this project's collectives: who waits for one runs its hops.

    Of a gather, the first hop runs ahead of its use, the others when it is used. Each reduction
    advances the ones before it by a hop.
    """

    forward_ahead = AHEAD
    backward_ahead = 1

    def __init__(self, blocks: Sequence[UnitWork], root: UnitWork) -> None:
        super().__init__(blocks, root)
        self._running: list[
            tuple[float, tuple[HopTime, ...]]
        ] = []  # end of a hop, and hops to come

    def _issue(self, unit: int, gather: Collective) -> None:
        if unit not in self._arrivals and gather.hops:
            self._arrivals[unit] = self._send(gather.hops[:1], self.now), gather

    def _use(self, unit: int, gather: Collective) -> None:
        if unit in self._arrivals:
            arrival, started = self._arrivals.pop(unit)
            self.now = self._send(started.hops[1:], max(self.now, arrival))
        self.now += gather.kernels

    def _reduce(self, reduction: Collective) -> None:
        if not (reduction.hops or reduction.kernels):
            return
        self.now += reduction.kernels
        first = self._send(reduction.hops[:1], self.now)
        self._advance()
        self._running.append((first, reduction.hops[1:]))

    def finish(self) -> None:
        while self._running:
            self._advance()

    def _advance(self) -> None:
        running, self._running = self._running, []
        for end, hops in running:
            self.now = max(self.now, end)
            if hops:
                self._running.append((self._send(hops[:1], self.now), hops[1:]))
