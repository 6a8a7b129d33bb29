"""Which parameters had a gradient on some rank: what the ranks tell each other after a pass.

Ranks may use different parameters of a unit, as with experts or dropped layers. Each rank then
sends zeros for those it did not use, so that all reduce the same buffers, and the mean counts the
zeros. A parameter that no rank used must not be stepped: its `.grad` stays None, as in one process.
That takes one byte per parameter and pass, in one collective. The same collective shows whether the
ranks reduced the same units in the same order: if not, gradients were mixed up.
"""

import zlib
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from zeropp import fsdp_adapter as fsdp
from zeropp.errors import InputError

DIGEST_BYTES = 4  # of a CRC-32


class GradientUse:
    """Notes each unit's reduction in a backward pass, and compares notes with the other ranks."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group, self._device = group, device
        self._begin: dict[fsdp.FSDPModule, int] = {}  # of a unit's parameters among all
        self._used = bytearray()
        self._passes: set[int] = set()  # running backward passes at whose end ranks compare
        self.gradient_of: Callable[[nn.Parameter], torch.Tensor | None] = gradient_of
        self.clear_gradient: Callable[[nn.Parameter], None] = clear_gradient
        self.discard()

    def add(self, unit: fsdp.FSDPModule) -> None:
        """Include a unit, in the same order on every rank, between two passes."""
        self._begin[unit] = len(self._used)
        self._used += bytes(len(fsdp.own_pieces(unit)))

    def discard(self) -> None:
        """Forget the notes of a pass that did not end."""
        self._used = bytearray(len(self._used))
        self._order: list[fsdp.FSDPModule] = []
        self._unused: dict[int, nn.Parameter] = {}  # got zeros here, and had no gradient before
        self._passes.clear()

    def note(
        self, unit: fsdp.FSDPModule, with_gradient: Sequence[int], reduced: Sequence[int]
    ) -> None:
        """Note a reduction before it begins; see `zeropp.fsdp_adapter.before_reduction`."""
        if fsdp.backward_id() not in self._passes:
            self._passes.add(fsdp.backward_id())
            fsdp.after_backward(self._compare_last)
        self._order.append(unit)
        begin = self._begin[unit]
        for index in with_gradient:
            self._used[begin + index] = 1
            self._unused.pop(begin + index, None)
        if len(with_gradient) < len(reduced):
            shards = fsdp.shards(unit)
            for index in set(reduced).difference(with_gradient):
                place, shard = begin + index, shards[index]
                if not self._used[place] and self.gradient_of(shard) is None:
                    self._unused[place] = shard

    def _compare_last(self) -> None:
        """Compare after what else is to be done at the end of a pass: all reductions have ended."""
        fsdp.after_backward(self._compare)

    def _compare(self) -> None:
        """Clear zeros that all ranks sent; raise InputError if they reduced different units."""
        if not self._order:
            return
        used, order, unused = self._used, self._order, self._unused
        self.discard()
        for place, shard in unused.items():  # a penalty on the shards may have given it a gradient
            gradient = self.gradient_of(shard)
            if gradient is not None:
                own_part = gradient.to_local() if isinstance(gradient, DTensor) else gradient
                used[place] = bool(own_part.any())
        places = [self._begin[unit] for unit in order]
        digest = zlib.crc32(repr(places).encode()).to_bytes(DIGEST_BYTES, "little")
        inverse = bytes(255 - byte for byte in digest)
        notes = torch.frombuffer(used + digest + inverse, dtype=torch.uint8)
        if self._device.type != "cpu":  # from pageable memory, the host would wait for the device
            notes = notes.pin_memory().to(self._device, non_blocking=True)
        dist.all_reduce(notes, op=dist.ReduceOp.MAX, group=self._group)
        if self._device.type != "cpu" and not unused:
            return  # the host does not wait for the device
        values = bytes(notes.tolist())
        if not values.endswith(digest + inverse):
            raise InputError(
                "the ranks averaged the gradients of different units in this pass, or in another "
                f"order; this rank: {', '.join(map(fsdp.name_of, order))}. All ranks must run the "
                "same units in the same order; they may use different parameters of a unit: give "
                "zeropp.shard units= that every rank runs"
            )
        for place, shard in unused.items():
            if not values[place]:
                self.clear_gradient(shard)


def gradient_of(shard: nn.Parameter) -> torch.Tensor | None:
    """Return the gradient that a parameter holds itself."""
    return shard.grad


def clear_gradient(shard: nn.Parameter) -> None:
    """Drop the gradient that a parameter holds itself."""
    shard.grad = None
