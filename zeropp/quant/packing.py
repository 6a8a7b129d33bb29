"""How a row of elements is laid out in a packed row of bytes: raw values, scales, codes.

    packed row = [ raw segments | scales | codes ]      each part starts at a multiple of 16 bytes

A segment is one parameter's part of the row. Quantized segments are cut into blocks of
`BLOCK[bits]` elements; the last block is shorter if the segment is not a multiple, and no block
crosses a segment. A block has one bf16 scale and its codes: one int8 per element, two int4 or four
int2 per byte, or eight int3 in three bytes, the first one in the lowest bits. Codes of `ROTATED_4`
and of 3 and 2 bits stand for the elements after a rotation of each 32 of them, so that their
segments are a multiple of 32, or, with 3 bits, of their block. The codes of each segment start at a
multiple of 16 bytes.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from types import MappingProxyType
from typing import NamedTuple

import torch

ROTATED = 32  # elements that are rotated together
ROTATED_4 = ROTATED + 4  # the "bits" of a segment of 4-bit codes of rotated elements
RAW = 16  # the "bits" of a segment that is not quantized
CODE_BITS = MappingProxyType({8: 8, 4: 4, ROTATED_4: 4, 3: 3, 2: 2})  # by the bits of a segment
# By bits, elements that share a scale; docs/numerics.md says why.
BLOCK = MappingProxyType({8: 256, 4: 128, ROTATED_4: 128, 3: 64, 2: 128})
# Of elements, in such a segment.
MULTIPLE = MappingProxyType({ROTATED_4: ROTATED, 3: BLOCK[3], 2: ROTATED})
ALIGN = 16  # bytes
SCALE_BYTES = 2
FLOATS = (torch.bfloat16, torch.float16, torch.float32)  # in the order of csrc/shared/numbers.h
ELEMENTS, PACKED_BYTES, WIRE, COUNT, HEADER = range(5)  # indices into `RowLayout.table`


class Segment(NamedTuple):
    """The place of one segment: elements of the row, bytes of the packed row."""

    start: int  # elements
    size: int  # elements
    bits: int  # 2, 3, 4, 8, ROTATED_4 or RAW
    scales_at: int  # bytes; 0 for a raw segment
    data_at: int  # bytes; of the codes, or of the raw values

    @property
    def is_rotated(self) -> bool:
        """Whether its codes stand for rotated elements."""
        return is_rotated(self.bits)


@dataclass(frozen=True, kw_only=True)
class RowLayout:
    """How a row of C elements is laid out in P bytes.

    sizes: elements of each segment, in order; 0 is allowed. bits: 8, 4, `ROTATED_4`, 3 or 2 for a
    segment that is block-quantized (with `ROTATED_4` and 2 a multiple of 32 elements, with 3 of
    64), 16 for one that is sent unchanged, in the type `wire` (bf16, fp16 or fp32). Raises
    ValueError or TypeError for anything else.
    """

    sizes: tuple[int, ...]
    bits: tuple[int, ...]
    wire: torch.dtype

    def __post_init__(self) -> None:
        if len(self.sizes) != len(self.bits):
            raise ValueError(f"{len(self.sizes)} sizes, {len(self.bits)} bits: give one width each")
        for size, bits in self._pairs:
            if size < 0:
                raise ValueError(f"a segment of {size} elements")
            if bits not in BLOCK and bits != RAW:
                raise ValueError(
                    f"bits {bits}: a segment has 2, 3, 4, 8, {ROTATED_4} (4, rotated) or {RAW} "
                    "(not quantized)"
                )
            if size % MULTIPLE.get(bits, 1):
                raise ValueError(
                    f"{size} elements of {CODE_BITS[bits]} bits, rotated: give a multiple of "
                    f"{MULTIPLE[bits]}"
                )
        if self.wire not in FLOATS:
            raise TypeError(f"wire {self.wire}: give torch.bfloat16, float16 or float32")

    @cached_property
    def elements(self) -> int:
        """C, the elements of a row."""
        return sum(self.sizes)

    @cached_property
    def packed_bytes(self) -> int:
        """P, the bytes of a packed row, a multiple of 16.

        P = up(w * sum of n over raw segments) + up(2 * sum of ceil(n / BLOCK[b]))
          + sum of up(ceil(n * b / 8)), the last two over quantized segments of n elements and b
        bits of a code; w is the size of `wire` in bytes, and up() rounds up to a multiple of 16.
        """
        return self._parts[2] + sum(
            _up(_code_bytes(size, bits)) for size, bits in self._pairs if bits != RAW
        )

    @cached_property
    def segments(self) -> tuple[Segment, ...]:
        """The segments that are not empty."""
        segments, start = [], 0
        raw_at, scales_at, codes_at = self._parts
        for size, bits in self._pairs:
            if bits == RAW:
                segment = Segment(start, size, bits, 0, raw_at)
                raw_at += size * self.wire.itemsize
            else:
                segment = Segment(start, size, bits, scales_at, codes_at)
                scales_at += SCALE_BYTES * num_blocks(size, bits)
                codes_at += _up(_code_bytes(size, bits))
            if size:
                segments.append(segment)
            start += size
        return tuple(segments)

    @cached_property
    def table(self) -> tuple[int, ...]:
        """The layout as ops take it and kernels read it: 4 numbers, and 5 for each segment.

        C, P, the index of `wire` in FLOATS, the number of segments; then each `Segment`.
        """
        numbers = [self.elements, self.packed_bytes, FLOATS.index(self.wire), len(self.segments)]
        for segment in self.segments:
            numbers.extend(segment)
        return tuple(numbers)

    @cached_property
    def _pairs(self) -> tuple[tuple[int, int], ...]:
        return tuple(zip(self.sizes, self.bits, strict=True))

    @cached_property
    def _parts(self) -> tuple[int, int, int]:
        """The offsets of the raw values, the scales and the codes, in bytes."""
        raw = sum(size for size, bits in self._pairs if bits == RAW) * self.wire.itemsize
        blocks = sum(num_blocks(size, bits) for size, bits in self._pairs if bits != RAW)
        return 0, _up(raw), _up(raw) + _up(SCALE_BYTES * blocks)


@lru_cache(maxsize=4096)
def row_layout(sizes: tuple[int, ...], bits: tuple[int, ...], wire: torch.dtype) -> RowLayout:
    """The `RowLayout` of these arguments, cached with what it computes."""
    return RowLayout(sizes=sizes, bits=bits, wire=wire)


def segments_in(table: Sequence[int]) -> Iterator[Segment]:
    """The segments of a `RowLayout.table`."""
    for at in range(HEADER, len(table), len(Segment._fields)):
        yield Segment(*table[at : at + len(Segment._fields)])


def num_blocks(size: int, bits: int) -> int:
    """The number of blocks of a segment of `size` elements."""
    return -(-size // BLOCK[bits])


def is_rotated(bits: int) -> bool:
    """Whether codes of a segment of these `bits` stand for rotated elements."""
    return bits in (ROTATED_4, 3, 2)


def _code_bytes(size: int, bits: int) -> int:
    return -(-size * CODE_BITS[bits] // 8)


def _up(count: int) -> int:
    return -(-count // ALIGN) * ALIGN
