"""Collectives under way without streams: on a CPU whoever needs the result carries them on.

A collective of several hops is a generator that yields the `dist.Work` it must wait for before its
next hop, or `None` where the hop was not asynchronous. On CUDA nothing is in flight here: the hops
follow each other on FSDP2's streams, and the host waits for none of them.
"""

from collections.abc import Iterator

import torch.distributed as dist

from zeropp import fsdp_adapter as fsdp

Hops = Iterator[dist.Work | None]


def run(hops: Hops) -> None:
    """Carry a collective through to its end."""
    for work in hops:
        if work is not None:
            work.wait()


class Gathering(dist.Work):
    """An asynchronous gather; `wait` carries it on from hop to hop."""

    def __init__(self, hops: Hops) -> None:
        super().__init__()
        self._hops = hops
        self._arriving = next(hops, None)

    def wait(self, timeout: object = None) -> bool:
        if self._arriving is not None:
            self._arriving.wait()
            self._arriving = None
            run(self._hops)
        return True


class Reductions:
    """The asynchronous reductions of a backward pass: each new one carries the others a hop on.

    So a hop has the time in which other units compute their gradients. All of them have ended when
    `backward()` returns. Every rank adds the same ones in the same order.
    """

    def __init__(self) -> None:
        self._running: list[tuple[Hops, dist.Work]] = []
        self._backward = None  # the pass that they belong to

    def add(self, hops: Hops) -> None:
        """Start a reduction, then carry on those that were started before."""
        if self._backward != fsdp.backward_id():
            self._finish()  # a pass within a pass, or one that an error ended
            self._backward = fsdp.backward_id()
            fsdp.after_backward(self._finish)
        begun = (hops, next(hops))
        self._carry_on()
        self._running.append(begun)

    def _carry_on(self) -> None:
        still = []
        for hops, work in self._running:
            work.wait()
            following = next(hops, None)
            if following is not None:
                still.append((hops, following))
        self._running = still

    def _finish(self) -> None:
        while self._running:
            self._carry_on()
        self._backward = None
