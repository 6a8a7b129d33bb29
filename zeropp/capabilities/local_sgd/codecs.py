"""How rows of fp32 numbers are packed to be sent to other nodes, by the bits of a number."""

from collections.abc import Sequence

import torch
from torch import Tensor

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
