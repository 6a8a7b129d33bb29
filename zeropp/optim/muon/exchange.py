"""Lists of tensors, of sizes that all know, from each rank of a group to each other one."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zeropp.optim.muon.blocks import Round
from zeropp.quant.ops import dequantize, quantize
from zeropp.quant.packing import RowLayout, row_layout
from zeropp.wire.communicator import Communicator

PURPOSE = "optimizer"  # in the ledger
INT8 = 8
Tensors = list[Tensor]  # flat


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """How tensors travel: as numbers of `dtype`, or to other nodes as INT8 with `quantizes`.

    Without a communicator the group has this rank alone. Tensors for this rank itself stay here.
    """

    dtype: torch.dtype
    device: torch.device  # of the collectives
    communicator: Communicator | None = None
    quantizes: bool = False

    def start(
        self, outgoing: Sequence[Tensors], sizes: Sequence[Sequence[int]]
    ) -> Callable[[], list[Tensors]]:
        """Send `outgoing[i]` to member i; return what waits for the tensors of each member.

        sizes: of those that each member sends.
        """
        own = 0 if self.communicator is None else self.communicator.place
        kept = [each.to(self.device, self.dtype) for each in outgoing[own]]
        if self.communicator is None:
            return lambda: [kept]
        others = [member for member in range(self.communicator.size) if member != own]
        sent = {member: self._packed(outgoing[member], member) for member in others}
        rooms = [
            0 if member == own else self._num_bytes(each, member)
            for member, each in enumerate(sizes)
        ]
        lengths = [len(sent[member]) if member != own else 0 for member in range(len(sizes))]
        message = joined([*sent.values()], torch.empty(0, dtype=torch.uint8, device=self.device))
        work, arrived = self.communicator.all_to_all_unequal(message, lengths, rooms, PURPOSE)

        def wait() -> list[Tensors]:
            work.wait()
            parts = arrived.split(rooms)
            return [
                kept if member == own else self._unpacked(part, sizes[member], member)
                for member, part in enumerate(parts)
            ]

        return wait

    def expected(self, rounds: Iterable[Round]) -> Counter[str]:
        """Return the bytes by hop that this rank sends to move blocks to their owners and back."""
        sent: Counter[str] = Counter()
        if self.communicator is None:
            return sent
        hop, own = self.communicator.hop, self.communicator.place
        for blocks in rounds:
            for member in (each for each in range(hop.size) if each != own):
                there = [block.size(own) for block in blocks if block.owner == member]
                back = [block.size(member) for block in blocks if block.owner == own]
                num_bytes = self._num_bytes(there, member) + self._num_bytes(back, member)
                sent.update(
                    hop.message_bytes(self.communicator.position, hop.members[member], num_bytes)
                )
        return sent

    def _layout(self, sizes: Sequence[int], member: int) -> RowLayout | None:
        """Return the layout of what is quantized on the way to or from a member, or None."""
        hop = self.communicator.hop
        is_near = hop.nodes.same(self.communicator.position, hop.members[member])
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
