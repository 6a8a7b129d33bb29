"""How rows of fp32 numbers are packed to be sent to other nodes, by the bits of a number.

Two bits, in plain PyTorch: of 32 elements each the rotated ones (zeropp/quant/reference.py), in
blocks of 128 with a bf16 scale s, which is 0.4 times the largest, and codes 0 to 3 for -1.5 s, -0.5
s, 0.5 s and 1.5 s, four to a byte, the first one in the lowest bits. On normal numbers the mean
square of the error is 0.128 of theirs, and codes have an entropy of 1.83 bits. Those with the least
error, of the root mean square as the scale, have 0.117 and 1.90 bits.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from zeropp.quant.ops import dequantize, quantize
from zeropp.quant.packing import ALIGN, BLOCK, RAW, ROTATED, ROTATED_4, SCALE_BYTES, row_layout
from zeropp.quant.reference import rotate, unrotate

SEGMENT_BITS = {32: RAW, 8: 8, 4: ROTATED_4}  # by the bits of a number that is sent
TWO_BITS_BLOCK = 128  # elements
STEP = 0.4  # between two levels, of the largest element of a block
WHOLE_BLOCKS = max(*BLOCK.values(), TWO_BITS_BLOCK)  # elements; a multiple of all blocks


class Codec(Protocol):
    """Packs rows of `elements`, each into `packed_bytes`."""

    elements: int
    packed_bytes: int

    def pack(self, row: Tensor) -> Tensor:
        """Row, fp32 (elements,) -> uint8 (packed_bytes,), on the same device."""

    def unpack(self, packed: Tensor) -> Tensor:
        """Undo `pack`, but for rounding."""


def codec(sizes: Sequence[int], bits: int) -> Codec:
    """Return what packs a row of segments of these sizes, in `bits` (2, 4, 8, or 32: fp32 itself).

    Sizes are multiples of 32. No block has elements of two segments.
    """
    return _TwoBits(sizes) if bits == 2 else _Quantized(sizes, bits)


def padded(size: int) -> int:
    """Return the size of a segment that has room for `size` elements."""
    return -(-size // ROTATED) * ROTATED


class _Quantized:
    """Codes of zeropp/quant."""

    def __init__(self, sizes: Sequence[int], bits: int) -> None:
        segments = (SEGMENT_BITS[bits],) * len(sizes)
        self._layout = row_layout(tuple(sizes), segments, torch.float32)
        self.elements, self.packed_bytes = self._layout.elements, self._layout.packed_bytes

    def pack(self, row: Tensor) -> Tensor:
        return quantize(row.view(1, -1), self._layout).view(-1)

    def unpack(self, packed: Tensor) -> Tensor:
        row = torch.empty(1, self.elements, device=packed.device)
        dequantize(packed.view(1, -1), row, self._layout)
        return row.view(-1)


class _TwoBits:
    """Packed row: scales, then codes."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = tuple(sizes)
        self._room = [-(-size // TWO_BITS_BLOCK) * TWO_BITS_BLOCK for size in sizes]
        self.elements, coded = sum(sizes), sum(self._room)
        self._scale_bytes = SCALE_BYTES * (coded // TWO_BITS_BLOCK)
        self._end = self._scale_bytes + coded // 4  # of the codes
        self.packed_bytes = -(-self._end // ALIGN) * ALIGN

    def pack(self, row: Tensor) -> Tensor:
        segments = zip(row.split(self._sizes), self._room, strict=True)
        whole = torch.cat([pad(part, (0, room - len(part))) for part, room in segments])
        blocks = rotate(whole.view(1, -1)).view(-1, TWO_BITS_BLOCK)
        scales = (STEP * blocks.abs().amax(1)).bfloat16()
        steps = scales.float()[:, None]
        codes = (blocks / steps.where(steps != 0, 1.0)).floor().clamp(-2, 1) + 2
        fours = codes.nan_to_num().to(torch.uint8).view(-1, 4)
        low, high = fours[:, 0] | fours[:, 1] << 2, fours[:, 2] << 4 | fours[:, 3] << 6
        packed = torch.cat((scales.view(torch.uint8), low | high))
        return pad(packed, (0, self.packed_bytes - self._end))

    def unpack(self, packed: Tensor) -> Tensor:
        scales = packed[: self._scale_bytes].clone().view(torch.bfloat16).float()
        coded = packed[self._scale_bytes : self._end, None]
        fours = coded >> torch.arange(0, 8, 2, device=packed.device)
        values = ((fours & 3).float() - 1.5).view(-1, TWO_BITS_BLOCK) * scales[:, None]
        whole = unrotate(values.view(1, -1)).view(-1)
        segments = zip(whole.split(self._room), self._sizes, strict=True)
        return torch.cat([part[:size] for part, size in segments])
