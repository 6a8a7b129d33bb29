"""The mean of tensors over nodes, in few bits: each part has a node, its owner, that sums it.

    tensors, in N parts each  ->  quantized, to their owners  ->  means  ->  quantized, to all nodes

All nodes, the owners too, go on with the values that were sent, so that they stay alike to the bit.
What the second rounding loses is added to the next means (error feedback). Parts of a tensor are
quantized by themselves, and their owners do not depend on its place among others: equal tensors, as
tied weights on several ranks, stay equal.
"""

from collections.abc import Callable, Sequence
from functools import cached_property

import torch
from torch import Tensor

from zeropp.optim.local_steps.outer_group import OuterGroup
from zeropp.quant.coded_message import CodedError, decode, encode
from zeropp.quant.ops import dequantize, quantize
from zeropp.quant.packing import BLOCK, RAW, ROTATED, ROTATED_4, RowLayout, row_layout

SEGMENT_BITS = {32: RAW, 8: 8, 4: ROTATED_4}  # by the bits of a number that is sent
WHOLE_BLOCKS = max(BLOCK.values())  # elements; parts are multiples of it
Update = Callable[[Tensor], Tensor]


class OuterMean:
    """Means of tensors of these `sizes` (elements) on `device`, over the nodes of a group.

    bits: of a number that is sent, 4, 8, or 32 for fp32 itself. `error` is what the last rounding
    of the means lost, of the elements that this node owns.
    """

    def __init__(
        self, sizes: Sequence[int], group: OuterGroup, bits: int, device: torch.device
    ) -> None:
        self.group, self._sizes, self._bits = group, tuple(sizes), bits
        self.error = torch.zeros(self.layouts[group.node].elements, device=device)
        # Padding is 0, and what comes back of it, as it is rounded with its block, is not.
        self._is_real = self.own([torch.ones(size, device=device) for size in sizes]).bool()

    @cached_property
    def layouts(self) -> list[RowLayout]:
        """How the elements that each node owns are laid out in a message."""
        bits = (SEGMENT_BITS[self._bits],) * len(self._sizes)
        return [
            row_layout(tuple(_padded(end - first) for first, end in parts), bits, torch.float32)
            for parts in self._parts
        ]

    @property
    def message_bytes(self) -> int:
        """What this node sends to form and to return one mean, before it is coded."""
        node, num_others = self.group.node, self.group.size - 1
        to_owners = sum(
            each.packed_bytes for owner, each in enumerate(self.layouts) if owner != node
        )
        return to_owners + num_others * self.layouts[node].packed_bytes

    def run(self, tensors: Sequence[Tensor], update: Update = lambda mean: mean) -> list[Tensor]:
        """Return, on every node alike, the `update` of the means of flat fp32 tensors over nodes.

        `update` maps means of the elements that this node owns, `own`, to as many values.
        """
        rows = [self.own(tensors, owner) for owner in range(self.group.size)]
        messages = [self._message(row, owner) for owner, row in enumerate(rows)]
        node = self.group.node
        total = torch.zeros_like(rows[node])
        for sender, message in enumerate(self.group.exchange(messages)):
            total += rows[node] if sender == node else self._row(message, node, sender)
        wanted = update(self._is_real * total / self.group.size) + self.error
        message = self._message(wanted, node)
        arrived = self.group.exchange([message] * self.group.size)
        values = [self._row(each, owner, owner) for owner, each in enumerate(arrived)]
        self.error = self._is_real * (wanted - values[node])
        return self._joined(values)

    def own(self, tensors: Sequence[Tensor], owner: int | None = None) -> Tensor:
        """Return the elements of tensors that a node owns, by default this one, with padding."""
        owner = self.group.node if owner is None else owner
        row = self.error.new_zeros(self.layouts[owner].elements)
        spaces = row.split(self.layouts[owner].sizes)
        for tensor, space, (first, end) in zip(tensors, spaces, self._parts[owner], strict=True):
            space[: end - first] = tensor[first:end]
        return row

    def spread(self, own: Tensor) -> list[Tensor]:
        """Return tensors of which this node's elements are `own`, and all others zero."""
        rows = [
            own if owner == self.group.node else own.new_zeros(layout.elements)
            for owner, layout in enumerate(self.layouts)
        ]
        return self._joined(rows)

    @cached_property
    def _parts(self) -> list[list[tuple[int, int]]]:
        """Which elements of each tensor each node owns: from the first to before the second."""
        nodes, parts = self.group.size, []
        for owner in range(nodes):
            of_owner = []
            for size in self._sizes:
                length = -(-size // nodes // WHOLE_BLOCKS) * WHOLE_BLOCKS
                of_owner.append((min(owner * length, size), min((owner + 1) * length, size)))
            parts.append(of_owner)
        return parts

    def _joined(self, rows: Sequence[Tensor]) -> list[Tensor]:
        tensors = [rows[0].new_empty(size) for size in self._sizes]
        for row, layout, parts in zip(rows, self.layouts, self._parts, strict=True):
            for tensor, space, (first, end) in zip(
                tensors, row.split(layout.sizes), parts, strict=True
            ):
                tensor[first:end] = space[: end - first]
        return tensors

    def _message(self, row: Tensor, owner: int) -> Tensor:
        packed = quantize(row.view(1, -1), self.layouts[owner]).view(-1).cpu()
        return packed if self._bits == 32 or not len(packed) else encode(packed)

    def _row(self, message: Tensor, owner: int, sender: int) -> Tensor:
        layout = self.layouts[owner]
        packed = torch.empty(layout.packed_bytes, dtype=torch.uint8)
        if self._bits == 32 or not len(packed):
            packed = message
        else:
            try:
                decode(message, packed)
            except CodedError as error:
                raise CodedError(f"from node {sender}: {error}") from error
        row = torch.empty(1, layout.elements, device=self.error.device)
        dequantize(packed.to(self.error.device).view(1, -1), row, layout)
        return row.view(-1)


def _padded(size: int) -> int:
    return -(-size // ROTATED) * ROTATED
