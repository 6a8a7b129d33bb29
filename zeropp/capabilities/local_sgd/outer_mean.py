"""The quantized mean of tensors over replicas: each part is reduced by one replica, its owner.

    tensors, in N parts each  ->  quantized, to their owners  ->  means  ->  quantized, to all

All replicas, the owners too, use the values that were sent, so they stay equal to the bit.
What the second rounding loses is added to the next means, and with two bits, or where that is asked
for, what the first one loses to the next tensors (error feedback). Parts of a tensor are quantized
by themselves, and their owners do not depend on its place among others: equal tensors, as tied
weights on several ranks, stay equal.
"""

import copy
from collections.abc import Callable, Sequence
from functools import cached_property

import torch
from torch import Tensor

from zeropp.capabilities.local_sgd.outer_group import OuterGroup
from zeropp.quant.coded_message import CodedError, decode, encode
from zeropp.quant.ops import dequantize, quantize
from zeropp.quant.packing import BLOCK, RAW, ROTATED, ROTATED_4, row_layout

SEGMENT_BITS = {32: RAW, 8: 8, 4: ROTATED_4, 2: 2}  # by the bits of a number that is sent
WHOLE_BLOCKS = max(BLOCK.values())  # elements; a multiple of all blocks


def padded(size: int) -> int:
    """Return the size of a segment that has room for `size` elements."""
    return -(-size // ROTATED) * ROTATED


class Codec:
    """Packs rows of `elements`, each into `packed_bytes`.

    sizes: elements of each segment of a row, multiples of 32; no block has elements of two. bits:
    of a number, 2, 4, 8, or 32 for fp32 itself.
    """

    def __init__(self, sizes: Sequence[int], bits: int) -> None:
        segments = (SEGMENT_BITS[bits],) * len(sizes)
        self._layout = row_layout(tuple(sizes), segments, torch.float32)
        self.elements, self.packed_bytes = self._layout.elements, self._layout.packed_bytes

    def pack(self, row: Tensor) -> Tensor:
        """Row, fp32 (elements,) -> uint8 (packed_bytes,), on the same device."""
        return quantize(row.view(1, -1), self._layout).view(-1)

    def unpack(self, packed: Tensor) -> Tensor:
        """Undo `pack`, but for rounding."""
        row = torch.empty(1, self.elements, device=packed.device)
        dequantize(packed.view(1, -1), row, self._layout)
        return row.view(-1)


FEEDBACK = 2  # bits, at which what senders lose by rounding is too much to be lost
Update = Callable[[Tensor], Tensor]


class OuterMean:
    """Means of tensors of these `sizes` (elements) on `device`, over the nodes of a group.

    bits: of a number that is sent, 2, 4, 8, or 32 for fp32 itself. `error` is what the last
    rounding of the means lost, of the elements that this node owns, and `unsent` what was lost of
    the elements that it sent to each owner, if it `feeds` that to the next (default: two bits).
    """

    def __init__(
        self,
        sizes: Sequence[int],
        group: OuterGroup,
        bits: int,
        device: torch.device,
        *,
        feeds: bool | None = None,
    ) -> None:
        self.group, self.sizes, self._bits = group, tuple(sizes), bits
        self.node, self.num_nodes = group.node, group.size  # others may join the group later
        self.content = 0  # what nodes have alike in an exchange, as in `OuterGroup.exchange`
        self.feeds = bits <= FEEDBACK if feeds is None else feeds
        self.error = torch.zeros(self._codecs[self.node].elements, device=device)
        self.unsent = [self.error.new_zeros(each.elements) for each in self._codecs if self.feeds]

    def forget(self) -> None:
        """Forget what has been lost by rounding."""
        self.error.zero_()
        for each in self.unsent:
            each.zero_()

    @cached_property
    def _codecs(self) -> list[Codec]:
        """What packs the elements that each node owns."""
        return [Codec(sizes, self._bits) for sizes in self._padded_sizes]

    @cached_property
    def _padded_sizes(self) -> list[list[int]]:
        """How many elements each node owns of each tensor, with padding."""
        return [[padded(end - first) for first, end in parts] for parts in self._parts]

    @property
    def packed_bytes(self) -> int:
        """The bytes of all elements in messages, each once, before they are coded."""
        return sum(each.packed_bytes for each in self._codecs)

    @property
    def message_bytes(self) -> int:
        """What this node sends to form and to return one mean, before it is coded."""
        node, num_others = self.node, self.num_nodes - 1
        to_owners = sum(
            each.packed_bytes for owner, each in enumerate(self._codecs) if owner != node
        )
        return to_owners + num_others * self._codecs[node].packed_bytes

    def run(
        self,
        tensors: Sequence[Tensor],
        update: Update = lambda mean: mean,
        num_terms: int | None = None,
    ) -> list[Tensor]:
        """Return, on every node alike, the `update` of the means of flat fp32 tensors over nodes.

        `update` maps means of the elements that this node owns, `own`, to as many values.
        num_terms: of how many nodes it is the mean, the others having zeros; by default of all.
        """
        wanted = update(self.sum(tensors) / (num_terms or self.num_nodes)) + self.error
        node = self.node
        message = self._message(wanted, node)
        arrived = self.group.exchange([message] * self.num_nodes, self.content)
        values = [self._row(each, owner, owner) for owner, each in enumerate(arrived)]
        self.error = self._lost(wanted - values[node], node)
        return self.joined(values)

    def sum(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the sums over nodes of the elements of tensors that this node owns."""
        node, own = self.node, self.own(tensors)
        messages = [self._to_owner(tensors, owner) for owner in range(self.num_nodes)]
        total = torch.zeros_like(own)
        for sender, message in enumerate(self.group.exchange(messages, self.content)):
            total += own if sender == node else self._row(message, node, sender)
        return self._with_empty_padding(total, node)

    def copy(self) -> "OuterMean":
        """Return one that goes on from here."""
        other = copy.copy(self)
        other.unsent = list(self.unsent)
        return other

    def take_unsent(self, old: "OuterMean") -> None:
        """Go on with what the same node has not sent, of the elements that others own now."""
        if self.feeds:
            kept, owners = old.joined(old.unsent), range(self.num_nodes)
            self.unsent = [self.own(kept, owner) for owner in owners]
            self.unsent[self.node].zero_()

    def own(self, tensors: Sequence[Tensor], owner: int | None = None) -> Tensor:
        """Return the elements of tensors that a node owns, by default this one, with padding."""
        owner = self.node if owner is None else owner
        row = self.error.new_zeros(self._codecs[owner].elements)
        spaces = row.split(self._padded_sizes[owner])
        for tensor, space, (first, end) in zip(tensors, spaces, self._parts[owner], strict=True):
            space[: end - first] = tensor[first:end]
        return row

    def spread(self, own: Tensor) -> list[Tensor]:
        """Return tensors of which this node's elements are `own`, and all others zero."""
        rows = [
            own if owner == self.node else own.new_zeros(each.elements)
            for owner, each in enumerate(self._codecs)
        ]
        return self.joined(rows)

    @cached_property
    def _parts(self) -> list[list[tuple[int, int]]]:
        """Which elements of each tensor each node owns: from the first to before the second."""
        nodes, parts = self.num_nodes, []
        for owner in range(nodes):
            of_owner = []
            for size in self.sizes:
                length = -(-size // nodes // WHOLE_BLOCKS) * WHOLE_BLOCKS
                of_owner.append((min(owner * length, size), min((owner + 1) * length, size)))
            parts.append(of_owner)
        return parts

    def joined(self, rows: Sequence[Tensor]) -> list[Tensor]:
        """Return tensors by the elements that each node owns of them."""
        tensors = [rows[0].new_empty(size) for size in self.sizes]
        for row, sizes, parts in zip(rows, self._padded_sizes, self._parts, strict=True):
            for tensor, space, (first, end) in zip(tensors, row.split(sizes), parts, strict=True):
                tensor[first:end] = space[: end - first]
        return tensors

    def _to_owner(self, tensors: Sequence[Tensor], owner: int) -> Tensor:
        """Return the message to a node about what it owns; an empty one for this node itself."""
        if owner == self.node:
            return torch.empty(0, dtype=torch.uint8)
        row = self.own(tensors, owner)
        if not self.feeds:
            return self._message(row, owner)
        row += self.unsent[owner]
        message = self._message(row, owner)
        row -= self._row(message, owner, self.node)
        self.unsent[owner] = self._lost(row, owner)
        return message

    def _with_empty_padding(self, row: Tensor, owner: int) -> Tensor:
        """Set the padding of a row to 0, which is not what comes back of it: return the row."""
        spaces = row.split(self._padded_sizes[owner])
        for space, (first, end) in zip(spaces, self._parts[owner], strict=True):
            space[end - first :] = 0
        return row

    def _lost(self, row: Tensor, owner: int) -> Tensor:
        """Return errors of rounding: 0 for padding and after an overflow, whose step is skipped."""
        return self._with_empty_padding(row, owner).nan_to_num_(0.0, 0.0, 0.0)

    def _message(self, row: Tensor, owner: int) -> Tensor:
        packed = self._codecs[owner].pack(row).cpu()
        return packed if self._bits == 32 or not len(packed) else encode(packed)

    def _row(self, message: Tensor, owner: int, sender: int) -> Tensor:
        packed = message
        if self._bits != 32 and len(message):
            packed = torch.empty(self._codecs[owner].packed_bytes, dtype=torch.uint8)
            try:
                decode(message, packed)
            except CodedError as error:
                raise CodedError(f"from node {sender}: {error}") from error
        return self._codecs[owner].unpack(packed.to(self.error.device))
