"""The ops in plain PyTorch, on any device: the definition that all kernels match bit for bit.

Every function fills memory that it is given. `layout` is a `Layout.table`. The arithmetic is that
of csrc/quantize/math.h; docs/numerics.md explains it. Shapes: K rows, C elements of a row, P bytes
of a packed row, T terms of a sum.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from zeropp.quant.packing import (
    BLOCK,
    ELEMENTS,
    FLOATS,
    PACKED_BYTES,
    RAW,
    SCALE_BYTES,
    WIRE,
    Segment,
    num_blocks,
    segments_in,
)

TINY = 2.0**-94  # a block with no element this large becomes zeros


def quantize(rows: Tensor, packed: Tensor, layout: Sequence[int], fold: int) -> None:
    """rows (K, C) -> packed (K, P); packed row r*N+n is row n*fold+r, N = K // fold."""
    count, elements = rows.shape
    reordered = rows.view(count // fold, fold, elements).transpose(0, 1).reshape(count, elements)
    packed.zero_()
    for segment in segments_in(layout):
        values = reordered[:, segment.start : segment.start + segment.size]
        _pack(values, segment, packed, FLOATS[layout[WIRE]])


def dequantize(packed: Tensor, out: Tensor, layout: Sequence[int], fold: int) -> None:
    """packed (K, P) -> out (K, C); packed row r*N+n becomes row n*fold+r, N = K // fold."""
    rows = out.view(len(out) // fold, fold, layout[ELEMENTS]).transpose(0, 1)
    for segment in segments_in(layout):
        values = _unpack(packed, segment, FLOATS[layout[WIRE]]).to(out.dtype)
        part = rows[:, :, segment.start : segment.start + segment.size]
        part.copy_(values.view(part.shape))


def reduce_quantize(
    packed: Tensor, reduced: Tensor, layout: Sequence[int], layout_out: Sequence[int], terms: int
) -> None:
    """packed (T*K, P1), T outermost -> the quantized sums, reduced (K, P2)."""
    stacked = packed.view(terms, len(packed) // terms, layout[PACKED_BYTES])
    reduced.zero_()
    sums = _sums(stacked, layout)
    for total, segment in zip(sums, segments_in(layout_out), strict=True):
        _pack(total, segment, reduced, FLOATS[layout_out[WIRE]])


def reduce_dequantize(packed: Tensor, out: Tensor, layout: Sequence[int]) -> None:
    """packed (T, P) -> the sums over T, out (C,)."""
    sums = _sums(packed[:, None], layout)
    for total, segment in zip(sums, segments_in(layout), strict=True):
        out[segment.start : segment.start + segment.size].copy_(total[0])


def _unpack(packed: Tensor, segment: Segment, wire: torch.dtype) -> Tensor:
    """A segment's values (K, n): fp32 if it is quantized, else as they are, in `wire`."""
    if segment.bits == RAW:
        stop = segment.data_at + segment.size * wire.itemsize
        return packed[:, segment.data_at : stop].contiguous().view(wire)
    block, blocks = BLOCK[segment.bits], num_blocks(segment.size, segment.bits)
    stop = segment.scales_at + SCALE_BYTES * blocks
    scales = packed[:, segment.scales_at : stop].contiguous().view(torch.bfloat16).float()
    stop = segment.data_at - (-segment.size * segment.bits // 8)
    codes = packed[:, segment.data_at : stop].contiguous().view(torch.int8)
    if segment.bits == 4:
        codes = torch.stack(((codes << 4) >> 4, codes >> 4), dim=-1).flatten(1)
    padded = pad(codes[:, : segment.size].float(), (0, blocks * block - segment.size))
    values = padded.view(-1, blocks, block) * scales[..., None] + 0.0  # exact; never -0
    return values.flatten(1)[:, : segment.size]


def _pack(values: Tensor, segment: Segment, packed: Tensor, wire: torch.dtype) -> None:
    """Write a segment's values (K, n) to its place in the packed rows."""
    if not len(values):
        return
    if segment.bits == RAW:
        put(packed, segment.data_at, values.to(wire))
        return
    codes, scales = _quantized(values.float(), segment.bits)
    put(packed, segment.scales_at, scales)
    if segment.bits == 4:
        codes = pad(codes, (0, segment.size % 2))
        codes = (codes[:, 0::2] & 15) | (codes[:, 1::2] << 4)
    put(packed, segment.data_at, codes)


def put(packed: Tensor, offset: int, values: Tensor) -> None:
    """Write values (K, n) as bytes to a place in the packed rows (K, P)."""
    data = values.contiguous().view(torch.uint8)
    packed[:, offset : offset + data.shape[1]].copy_(data)


def _quantized(values: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """fp32 (K, n) -> codes int8 (K, n) and the bits of the bf16 scales, int16 (K, blocks)."""
    rows, size = values.shape
    block, blocks, top = BLOCK[bits], num_blocks(size, bits), 1 << (bits - 1)
    by_block = pad(values, (0, blocks * block - size)).view(rows, blocks, block)
    high, low = by_block.amax(-1), by_block.amin(-1)
    extreme = torch.where(high >= -low, high, low)
    usable = extreme.isfinite() & (extreme.abs() >= TINY)
    exact = (extreme * (-1.0 / top)).view(torch.int32)
    scale = torch.where(usable, (exact >> 16 << 16).view(torch.float32), 1.0)
    steps = torch.round(by_block * (1.0 / scale)[..., None]).clamp(-top, top - 1)
    codes = torch.where(usable[..., None], steps, 0.0).to(torch.int8)
    stored = torch.where(usable, scale, torch.where(extreme.isfinite(), 0.0, torch.nan))
    return codes.flatten(1)[:, :size], (stored.view(torch.int32) >> 16).to(torch.int16)


def _sums(stacked: Tensor, layout: Sequence[int]) -> Iterator[Tensor]:
    """packed (T, K, P) -> for each segment the fp32 sums (K, n), added in the order of T."""
    for segment in segments_in(layout):
        total = stacked.new_zeros((stacked.shape[1], segment.size), dtype=torch.float32)
        for term in stacked:
            total += _unpack(term, segment, FLOATS[layout[WIRE]])
        yield total
