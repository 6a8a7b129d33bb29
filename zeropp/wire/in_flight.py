"""Asynchronous collectives on CPUs, which have no streams: the caller that waits runs their hops.

A collective of several hops is a generator that yields the `dist.Work` it must wait for before its
next hop, or `None` if the hop was not asynchronous. On CUDA nothing is in flight here: the hops
follow each other on FSDP2's streams, and the host waits for none of them.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map_only

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


class InFlightTensor(torch.Tensor):
    """The result of a reduction that may still run: the first use of its values waits for it.

    FSDP2 gives views of the result to parameters as their `.grad` at once, and adds to gradients
    that exist. Hooks, penalties and a second reduction may then read or write a gradient before
    the pass ends.
    """

    @staticmethod
    def __new__(cls, buffer: torch.Tensor, reductions: "Reductions") -> "InFlightTensor":
        return torch.Tensor._make_wrapper_subclass(
            cls,
            buffer.shape,
            strides=buffer.stride(),
            storage_offset=buffer.storage_offset(),
            dtype=buffer.dtype,
            device=buffer.device,
        )

    def __init__(self, buffer: torch.Tensor, reductions: "Reductions") -> None:
        self.buffer, self.reductions = buffer, reductions
        self.divisor: float | None = None  # to divide by, while the reduction runs

    def filled_by(self, hops: Hops) -> Hops:
        """Return the hops of the reduction, followed by a division that is asked for meanwhile."""
        self.divisor = 1.0
        yield from hops
        divisor, self.divisor = self.divisor, None
        if divisor != 1.0:
            self.buffer.div_(divisor)

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, args: tuple = (), kwargs: Mapping | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function is torch.ops.aten.as_strided.default:
            view = function(args[0].buffer, *args[1:], **kwargs)
            return cls(view, args[0].reductions)
        if function is torch.ops.aten.div_.Tensor and isinstance(args[1], float):
            if isinstance(args[0], cls) and args[0].divisor is not None:
                args[0].divisor *= args[1]
                return args[0]
        args, kwargs = tree_map_only(cls, cls.values, (args, kwargs))
        return function(*args, **kwargs)

    def values(self) -> torch.Tensor:
        """Return the plain tensor, after its reduction."""
        self.reductions.finish()
        return self.buffer


class Reductions:
    """The asynchronous reductions of a backward pass: each new one advances the others by a hop.

    A hop thus overlaps with the computation of other units' gradients. All reductions have ended
    when `backward()` returns, or when the values of one are used. Every rank adds the same ones in
    the same order, and each group's collectives keep that order.
    """

    def __init__(self) -> None:
        self._running: list[tuple[Hops, dist.Work]] = []
        self._units: dict[fsdp.Unit, None] = {}  # whose gradients may be in flight
        self._backward = None  # id of the pass they belong to

    def add(self, unit: fsdp.Unit, hops: Hops) -> None:
        """Start a reduction, then advance those that were started before."""
        if self._backward != fsdp.backward_id():
            self.end()  # a nested pass, or the last one ended with an error
            self._backward = fsdp.backward_id()
            fsdp.after_backward(self.end, unit)
        self._units[unit] = None
        first_work = next(hops)
        self._advance()
        self._running.append((hops, first_work))

    def finish(self) -> None:
        """Run all reductions to their ends."""
        while self._running:
            self._advance()

    def end(self) -> None:
        """Run all reductions to their ends, and make the gradients plain tensors again."""
        self.finish()
        for unit in self._units:
            for shard in fsdp.shards(unit):
                gradient = shard.grad
                if gradient is not None and isinstance(gradient._local_tensor, InFlightTensor):
                    gradient._local_tensor = gradient._local_tensor.buffer
        self._units.clear()
        self._backward = None

    def _advance(self) -> None:
        running, self._running = self._running, []
        for hops, work in running:
            work.wait()
            next_work = next(hops, None)
            if next_work is not None:
                self._running.append((hops, next_work))
