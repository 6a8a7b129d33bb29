"""How a row of elements lies in one packed row of bytes: values as they are, scales, codes.

    packed row = [ raw segments | scales | codes ]        each part starts at a multiple of 16 bytes

A segment is one parameter's part of the row. Quantized segments are cut into blocks of
`BLOCK[bits]` elements, the last one shorter where the segment is not a multiple; no block crosses
a segment. A block has one bf16 scale and its codes: one int8 per element, or two int4 per byte, the
first of the two in the lower half. The codes of each segment start at a multiple of 16 bytes.
"""

from dataclasses import dataclass
from functools import cached_property, lru_cache
from types import MappingProxyType

import torch

BLOCK = MappingProxyType({8: 256, 4: 128})  # elements that share a scale; docs/numerics.md
RAW = 16  # the "bits" of a segment that is not quantized
ALIGN = 16  # bytes
SCALE_BYTES = 2
FLOATS = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Where one segment lies: elements of the row, bytes of the packed row."""

    start: int  # elements
    size: int  # elements
    bits: int  # 4, 8 or RAW
    scales_at: int  # bytes; 0 for a raw segment
    data_at: int  # bytes; of the codes, or of the raw values


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How a row of C elements lies in P bytes.

    sizes: elements of each segment, in order; 0 is allowed. bits: 8 or 4 for a segment that is
    block-quantized, 16 for one that travels as it is, in the type `wire` (bf16, fp16 or fp32).
    Raises ValueError or TypeError for anything else.
    """

    sizes: tuple[int, ...]
    bits: tuple[int, ...]
    wire: torch.dtype

    def __post_init__(self) -> None:
        if len(self.sizes) != len(self.bits):
            raise ValueError(f"{len(self.sizes)} sizes and {len(self.bits)} bits: give as many")
        if wrong := [size for size in self.sizes if size < 0]:
            raise ValueError(f"a segment of {wrong[0]} elements")
        if wrong := [bits for bits in self.bits if bits not in BLOCK and bits != RAW]:
            raise ValueError(f"bits {wrong[0]}: a segment has 4, 8 or {RAW} (not quantized)")
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
        bits; w is the size of `wire` in bytes and up() rounds up to a multiple of 16.
        """
        return self._parts[2] + sum(
            _up(_code_bytes(size, bits)) for size, bits in self._pairs if bits != RAW
        )

    @cached_property
    def segments(self) -> tuple[Segment, ...]:
        """The segments that are not empty."""
        found, start = [], 0
        raw_at, scales_at, codes_at = self._parts
        for size, bits in self._pairs:
            if size:
                quantized = bits != RAW
                found.append(
                    Segment(
                        start=start, size=size, bits=bits,
                        scales_at=scales_at if quantized else 0,
                        data_at=codes_at if quantized else raw_at,
                    )
                )  # fmt: skip
            if bits == RAW:
                raw_at += size * self.wire.itemsize
            else:
                scales_at += SCALE_BYTES * num_blocks(size, bits)
                codes_at += _up(_code_bytes(size, bits))
            start += size
        return tuple(found)

    @cached_property
    def _pairs(self) -> tuple[tuple[int, int], ...]:
        return tuple(zip(self.sizes, self.bits, strict=True))

    @cached_property
    def _parts(self) -> tuple[int, int, int]:
        """Where the raw values, the scales and the codes begin, in bytes."""
        raw = sum(size for size, bits in self._pairs if bits == RAW) * self.wire.itemsize
        blocks = sum(num_blocks(size, bits) for size, bits in self._pairs if bits != RAW)
        return 0, _up(raw), _up(raw) + _up(SCALE_BYTES * blocks)


@lru_cache(maxsize=4096)
def layout_of(sizes: tuple[int, ...], bits: tuple[int, ...], wire: torch.dtype) -> Layout:
    """The one `Layout` of these arguments, so that what it computes is computed once."""
    return Layout(sizes=sizes, bits=bits, wire=wire)


def num_blocks(size: int, bits: int) -> int:
    """The blocks of a segment of `size` elements."""
    return -(-size // BLOCK[bits])


def _code_bytes(size: int, bits: int) -> int:
    return -(-size * bits // 8)


def _up(count: int) -> int:
    return -(-count // ALIGN) * ALIGN
