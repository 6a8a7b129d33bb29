"""Lists of tensors, of sizes that all know, from each rank of a group to each other one."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zeropp.capabilities.muon.blocks import Round
from zeropp.quant.ops import dequantize, quantize
from zeropp.quant.packing import RowLayout, row_layout
from zeropp.wire.rank_group import EXCHANGE, Message, RankGroup

INT8 = 8
Tensors = list[Tensor]  # flat


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """How tensors travel: as numbers of `dtype`, or to other nodes as INT8 with `quantizes`.

    Collectives run on `device`, where tensors for this rank itself stay.
    """

    group: RankGroup
    dtype: torch.dtype
    device: torch.device
    quantizes: bool = False

    def start(
        self, outgoing: Sequence[Tensors], sizes: Sequence[Sequence[int]]
    ) -> Callable[[], list[Tensors]]:
        """Send `outgoing[i]` to member i; return what waits for the tensors of each member.

        sizes: of those that each member sends.
        """
        own = self.group.index
        kept = [each.to(self.device, self.dtype) for each in outgoing[own]]
        if self.group.size == 1:
            return lambda: [kept]
        packed = [
            self._packed(tensors, member) if member != own else self._packed([], member)
            for member, tensors in enumerate(outgoing)
        ]
        rooms = [
            0 if member == own else self._num_bytes(each, member)
            for member, each in enumerate(sizes)
        ]
        message = joined(packed, torch.empty(0, dtype=torch.uint8, device=self.device))
        work, arrived = self.group.all_to_all_unequal(message, [*map(len, packed)], rooms)

        def wait() -> list[Tensors]:
            work.wait()
            parts = arrived.split(rooms)
            return [
                kept if member == own else self._unpacked(part, sizes[member], member)
                for member, part in enumerate(parts)
            ]

        return wait

    def messages(self, rounds: Iterable[Round], share: float = 1) -> Iterator[Message]:
        """Yield what this rank sends to move blocks to their owners and back; share: per step."""
        own, members = self.group.index, range(self.group.size)
        for blocks in rounds if self.group.size > 1 else ():
            for sizes in (
                [[each.size(own) for each in blocks if each.owner == member] for member in members],
                [[each.size(member) for each in blocks if each.owner == own] for member in members],
            ):
                num_bytes = tuple(self._num_bytes(each, i) for i, each in enumerate(sizes))
                yield self.group.message(EXCHANGE, num_bytes, times=share)

    def _layout(self, sizes: Sequence[int], member: int) -> RowLayout | None:
        """Return the layout of what is quantized on the way to or from a member, or None."""
        is_near = self.group.hop_to(self.group.members[member]) == "in_node"
        if is_near or not self.quantizes or not sum(sizes):
            return None
        return row_layout(tuple(sizes), (INT8,) * len(sizes), self.dtype)

    def _num_bytes(self, sizes: Sequence[int], member: int) -> int:
        layout = self._layout(sizes, member)
        return sum(sizes) * self.dtype.itemsize if layout is None else layout.packed_bytes

    def _packed(self, tensors: Tensors, member: int) -> Tensor:
        """Return the message to a member, uint8."""
        layout = self._layout([len(each) for each in tensors], member)
        like = torch.empty(0, dtype=self.dtype, device=self.device)
        if any(each.device != like.device for each in tensors):
            tensors = [torch.cat(tensors).to(like.device)]
        if layout is None:
            return joined(tensors, like).view(torch.uint8)
        return quantize(joined(tensors, like.float()).view(1, -1), layout).view(-1)

    def _unpacked(self, message: Tensor, sizes: Sequence[int], member: int) -> Tensors:
        layout = self._layout(sizes, member)
        if layout is None:
            return [*message.view(self.dtype).split([*sizes])]
        numbers = torch.empty(1, sum(sizes), dtype=self.dtype, device=message.device)
        dequantize(message.view(1, -1), numbers, layout)
        return [*numbers.view(-1).split([*sizes])]


def joined(tensors: Tensors, like: Tensor) -> Tensor:
    """Return flat tensors one after another, with the dtype of the empty tensor `like`.

    A single one of that dtype, without gaps, is not copied.
    """
    if len(tensors) == 1:
        return tensors[0].to(like.dtype).contiguous()
    result = like.new_empty(sum(map(len, tensors)))
    return torch.cat(tensors, out=result) if tensors else result
