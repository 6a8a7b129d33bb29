"""How rows of fp32 numbers are packed to be sent to other nodes, by the bits of a number.

Two bits, in plain PyTorch: 32 elements each are rotated, and 128 rotated ones have a bf16 scale s,
which is 0.4 times the largest, and codes 0 to 3 for -1.5 s, -0.5 s, 0.5 s and 1.5 s, four to a
byte. On normal numbers the mean square of the error is 0.128 of theirs, and codes have an entropy
of 1.83 bits; with the root mean square as the scale it would be 0.117 and 1.90 bits. What codes
stand for is computed without rounding but for the scale, so that all nodes compute the same.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from zeropp.quant.ops import dequantize, quantize
from zeropp.quant.packing import ALIGN, BLOCK, RAW, ROTATED, ROTATED_4, SCALE_BYTES, row_layout

SEGMENT_BITS = {32: RAW, 8: 8, 4: ROTATED_4}  # by the bits of a number that is sent
TWO_BITS_BLOCK = 128  # elements
PIECE = 2**20  # elements, whole blocks
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
    """Packed row: scales, then codes. It is packed in pieces, which bounds the memory it takes."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = tuple(sizes)
        self._room = [-(-size // TWO_BITS_BLOCK) * TWO_BITS_BLOCK for size in sizes]
        self.elements, coded = sum(sizes), sum(self._room)
        self._scale_bytes = SCALE_BYTES * (coded // TWO_BITS_BLOCK)
        self._end = self._scale_bytes + coded // 4  # of the codes
        self.packed_bytes = -(-self._end // ALIGN) * ALIGN

    def pack(self, row: Tensor) -> Tensor:
        packed = row.new_zeros(self.packed_bytes, dtype=torch.uint8)
        scales, codes = self._parts(packed)
        segments = zip(row.split(self._sizes), self._room, strict=True)
        whole = torch.cat([pad(part, (0, room - len(part))) for part, room in segments])
        for piece, its_scales, its_codes in zip(
            whole.split(PIECE),
            scales.split(PIECE // TWO_BITS_BLOCK),
            codes.split(PIECE // 4),
            strict=True,
        ):
            _pack(piece, its_scales, its_codes)
        return packed

    def unpack(self, packed: Tensor) -> Tensor:
        scales, codes = self._parts(packed.clone())  # aligned
        pieces = zip(scales.split(PIECE // TWO_BITS_BLOCK), codes.split(PIECE // 4), strict=True)
        whole = torch.cat([_unpack(*piece) for piece in pieces])
        segments = zip(whole.split(self._room), self._sizes, strict=True)
        return torch.cat([part[:size] for part, size in segments])

    def _parts(self, packed: Tensor) -> tuple[Tensor, Tensor]:
        """Return the scales and the codes in a packed row."""
        scales = packed[: self._scale_bytes].view(torch.bfloat16)
        return scales, packed[self._scale_bytes : self._end]


def _pack(piece: Tensor, scales: Tensor, codes: Tensor) -> None:
    """Elements, n of whole blocks -> scales (n / 128,) and codes (n / 4,)."""
    columns = _rotated(piece.view(-1, ROTATED).t().contiguous())  # [32, n / 32]
    extremes = columns.abs().amax(0).view(-1, TWO_BITS_BLOCK // ROTATED).amax(1)
    scales.copy_(STEP * extremes)
    steps = scales.float().repeat_interleave(TWO_BITS_BLOCK // ROTATED)
    levels = (columns / steps.where(steps != 0, 1.0)).floor_().clamp_(-2, 1).nan_to_num_().add_(2)
    first, second, third, fourth = levels.to(torch.uint8).view(8, 4, len(steps)).unbind(1)
    codes.copy_((first | second << 2 | third << 4 | fourth << 6).view(-1))


def _unpack(scales: Tensor, codes: Tensor) -> Tensor:
    """Undo `_pack`, but for rounding."""
    steps = scales.float().repeat_interleave(TWO_BITS_BLOCK // ROTATED) / (2 * ROTATED)
    fours = codes.view(8, len(steps))  # [8, n / 32]
    codes = torch.stack([fours >> shift & 3 for shift in (0, 2, 4, 6)], 1)
    whole = _rotated(
        codes.view(ROTATED, len(steps)).float().mul_(2).sub_(3)
    )  # whole numbers, so that no sum is rounded
    return whole.mul_(steps).t().reshape(-1)


def _rotated(columns: Tensor) -> Tensor:
    """Multiply the columns of (32, n) by the Hadamard matrix of +-1; twice: times 32."""
    stride = ROTATED // 2
    while stride:
        rotated = torch.empty_like(columns)
        pairs = (ROTATED // 2 // stride, 2, stride, columns.shape[1])
        first, second = columns.view(pairs).unbind(1)
        sums, differences = rotated.view(pairs).unbind(1)
        torch.add(first, second, out=sums)
        torch.sub(first, second, out=differences)
        columns, stride = rotated, stride // 2
    return columns
