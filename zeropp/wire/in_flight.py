"""Asynchronous collectives on CPUs, which have no streams: the caller that waits runs their hops.

A collective of several hops is a generator that yields the `dist.Work` it must wait for before its
next hop, or `None` if the hop was not asynchronous. On CUDA nothing is in flight here: the hops
follow each other on FSDP2's streams, and the host waits for none of them.
"""

from collections.abc import Iterator

import torch.distributed as dist

from zeropp import fsdp_adapter as fsdp

Hops = Iterator[dist.Work | None]


def run(hops: Hops) -> None:
    """Run a collective to its end."""
    for work in hops:
        if work is not None:
            work.wait()


class Gathering(dist.Work):
    """An asynchronous gather; `wait` runs its remaining hops."""

    def __init__(self, hops: Hops) -> None:
        super().__init__()
        self._hops = hops
        self._pending = next(hops, None)

    def wait(self, timeout: object = None) -> bool:
        if self._pending is not None:
            self._pending.wait()
            self._pending = None
            run(self._hops)
        return True


class Reductions:
    """The asynchronous reductions of a backward pass: each new one advances the others by a hop.

    A hop thus overlaps with the computation of other units' gradients. All reductions have ended
    when `backward()` returns. Every rank adds the same ones in the same order.
    """

    def __init__(self) -> None:
        self._running: list[tuple[Hops, dist.Work]] = []
        self._backward = None  # id of the pass they belong to

    def add(self, hops: Hops) -> None:
        """Start a reduction, then advance those that were started before."""
        if self._backward != fsdp.backward_id():
            self._finish()  # a nested pass, or the last one ended with an error
            self._backward = fsdp.backward_id()
            fsdp.after_backward(self._finish)
        first_work = next(hops)
        self._advance()
        self._running.append((hops, first_work))

    def _advance(self) -> None:
        running = []
        for hops, work in self._running:
            work.wait()
            next_work = next(hops, None)
            if next_work is not None:
                running.append((hops, next_work))
        self._running = running

    def _finish(self) -> None:
        while self._running:
            self._advance()
        self._backward = None
