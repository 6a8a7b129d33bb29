"""The quantization ops in plain PyTorch: the definition that every kernel equals bit for bit.

Each works on any device. The arithmetic is that of csrc/quant_math.h; docs/numerics.md explains it.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import pad

from zeropp.quant.packing import BLOCK, RAW, SCALE_BYTES, Layout, Segment, num_blocks

TINY = 2.0**-94  # a block with no element this large becomes zeros


def quantize(rows: Tensor, layout: Layout, fold: int) -> Tensor:
    """rows (K, C) -> uint8 (K, P); output row r*N+n is input row n*fold+r, N = K // fold."""
    count, elements = rows.shape
    source = rows.view(count // fold, fold, elements).transpose(0, 1).reshape(count, elements)
    packed = rows.new_zeros((count, layout.packed_bytes), dtype=torch.uint8)
    for segment in layout.segments:
        part = source[:, segment.start : segment.start + segment.size]
        _pack(part, segment, packed, layout.wire)
    return packed


def dequantize(packed: Tensor, out: Tensor, layout: Layout, fold: int) -> None:
    """packed (K, P) -> out (K, C); packed row r*N+n goes to out row n*fold+r, N = K // fold."""
    rows = out.view(len(out) // fold, fold, layout.elements).transpose(0, 1)
    for segment in layout.segments:
        values = unpack(packed, segment, layout.wire).to(out.dtype)
        part = rows[:, :, segment.start : segment.start + segment.size]
        part.copy_(values.view(part.shape))


def reduce_quantize(packed: Tensor, layout: Layout, onto: Layout, terms: int) -> Tensor:
    """packed (T*K, P1), T outermost -> the quantized sums, uint8 (K, P2)."""
    stacked = packed.view(terms, len(packed) // terms, layout.packed_bytes)
    reduced = packed.new_zeros((stacked.shape[1], onto.packed_bytes))
    sums = _sums(stacked, layout)
    for total, segment in zip(sums, onto.segments, strict=True):
        _pack(total, segment, reduced, onto.wire)
    return reduced


def reduce_dequantize(packed: Tensor, out: Tensor, layout: Layout) -> None:
    """packed (T, P) -> the sums over T, out (C,)."""
    sums = _sums(packed[:, None], layout)
    for total, segment in zip(sums, layout.segments, strict=True):
        out[segment.start : segment.start + segment.size].copy_(total[0])


def unpack(packed: Tensor, segment: Segment, wire: torch.dtype) -> Tensor:
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


def _pack(part: Tensor, segment: Segment, packed: Tensor, wire: torch.dtype) -> None:
    """Write a segment's values (K, n) to its place in the packed rows."""
    if not len(part):
        return
    if segment.bits == RAW:
        _put(packed, segment.data_at, part.to(wire))
        return
    codes, scales = _quantized(part.float(), segment.bits)
    _put(packed, segment.scales_at, scales)
    if segment.bits == 4:
        codes = pad(codes, (0, segment.size % 2))
        codes = (codes[:, 0::2] & 15) | (codes[:, 1::2] << 4)
    _put(packed, segment.data_at, codes)


def _put(packed: Tensor, at: int, values: Tensor) -> None:
    data = values.contiguous().view(torch.uint8)
    packed[:, at : at + data.shape[1]].copy_(data)


def _quantized(values: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """fp32 (K, n) -> codes int8 (K, n) and the bits of the bf16 scales, int16 (K, blocks)."""
    rows, size = values.shape
    block, blocks, top = BLOCK[bits], num_blocks(size, bits), 1 << (bits - 1)
    cut = pad(values, (0, blocks * block - size)).view(rows, blocks, block)
    high, low = cut.amax(-1), cut.amin(-1)
    extreme = torch.where(high >= -low, high, low)
    usable = extreme.isfinite() & (extreme.abs() >= TINY)
    exact = (extreme * (-1.0 / top)).view(torch.int32)
    scale = torch.where(usable, (exact >> 16 << 16).view(torch.float32), 1.0)
    steps = torch.round(cut * (1.0 / scale)[..., None]).clamp(-top, top - 1)
    codes = torch.where(usable[..., None], steps, 0.0).to(torch.int8)
    kept = torch.where(usable, scale, torch.where(extreme.isfinite(), 0.0, torch.nan))
    return codes.flatten(1)[:, :size], (kept.view(torch.int32) >> 16).to(torch.int16)


def _sums(stacked: Tensor, layout: Layout) -> Iterator[Tensor]:
    """packed (T, K, P) -> for each segment the fp32 sums (K, n), added in the order of T."""
    for segment in layout.segments:
        total = stacked.new_zeros((stacked.shape[1], segment.size), dtype=torch.float32)
        for term in stacked:
            total += unpack(term, segment, layout.wire)
        yield total
