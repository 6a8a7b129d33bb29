"""The ops in plain PyTorch, on any device: the definition that all kernels match bit for bit.

Every function fills memory that it is given. `layout` is a `RowLayout.table`. The arithmetic is
that of csrc/quantize/math.h; docs/numerics.md explains it. Shapes: K rows, C elements of a row,
P bytes of a packed row, T terms of a sum.
"""

from collections.abc import Sequence
from types import MappingProxyType

import torch
from torch import Tensor
from torch.nn.functional import pad

from zeropp.quant.packing import (
    BLOCK,
    CODE_BITS,
    ELEMENTS,
    FLOATS,
    PACKED_BYTES,
    RAW,
    ROTATED,
    ROTATED_4,
    SCALE_BYTES,
    WIRE,
    Segment,
    is_rotated,
    num_blocks,
    segments_in,
)

TINY = 2.0**-94  # a block with no element this large becomes zeros
MOST_CODES = 129  # that the largest element may need: a truncated scale begins with up to these
FEW_CODES = 58  # 45% of what there are: a block that needs fewer doubles them
GROWN = 1.25 / 127  # of the largest element: the scale of a block that outgrew its own, or had none
PER_EXTREME = MappingProxyType(  # by bits, the scale before it becomes bf16; 1/7 and 1/5 in fp32
    {8: -1 / 128, 4: -1 / 8, ROTATED_4: 9586981 / 2**26, 3: 9 / 64, 2: 13421773 / 2**26}
)


def quantize(rows: Tensor, packed: Tensor, layout: Sequence[int], fold: int) -> None:
    """rows (K, C) -> packed (K, P); packed row r*N+n is row n*fold+r, N = K // fold."""
    count, elements = rows.shape
    reordered = rows.view(count // fold, fold, elements).transpose(0, 1).reshape(count, elements)
    packed.zero_()
    for segment in segments_in(layout):
        values = reordered[:, segment.start : segment.start + segment.size]
        values = rotate(values.float()) if segment.is_rotated else values
        _pack(values, segment, packed, FLOATS[layout[WIRE]])


def requantize(rows: Tensor, held: Tensor, packed: Tensor, layout: Sequence[int]) -> None:
    """rows (K, C) and packed rows that are held (K, P) -> packed (K, P), by the same scales.

    A block of INT8 keeps its scale while it fits: until its largest element needs more codes than
    there are, or so few that twice as many would do.
    """
    packed.zero_()
    for segment in segments_in(layout):
        values = rows[:, segment.start : segment.start + segment.size]
        if segment.bits == RAW:
            _pack(values, segment, packed, FLOATS[layout[WIRE]])
            continue
        stop = segment.scales_at + SCALE_BYTES * num_blocks(segment.size, 8)
        scales = held[:, segment.scales_at : stop].contiguous().view(torch.bfloat16).float()
        codes, kept = _quantized(values.float(), 8, scales)
        put(packed, segment.scales_at, kept)
        put(packed, segment.data_at, codes)


def dequantize(packed: Tensor, out: Tensor, layout: Sequence[int], fold: int) -> None:
    """packed (K, P) -> out (K, C); packed row r*N+n becomes row n*fold+r, N = K // fold."""
    rows = out.view(len(out) // fold, fold, layout[ELEMENTS]).transpose(0, 1)
    for segment in segments_in(layout):
        values = _unpack(packed, segment, FLOATS[layout[WIRE]])
        values = (unrotate(values) if segment.is_rotated else values).to(out.dtype)
        part = rows[:, :, segment.start : segment.start + segment.size]
        part.copy_(values.view(part.shape))


def reduce_quantize(
    packed: Tensor, reduced: Tensor, layout: Sequence[int], layout_out: Sequence[int], terms: int
) -> None:
    """packed (T*K, P1), T outermost -> the quantized sums, reduced (K, P2).

    Sums of rotated elements stay rotated if their codes, too, stand for rotated ones.
    """
    stacked = packed.view(terms, len(packed) // terms, layout[PACKED_BYTES])
    reduced.zero_()
    for source, target in zip(segments_in(layout), segments_in(layout_out), strict=True):
        total = _sum(stacked, source, FLOATS[layout[WIRE]])
        if source.is_rotated != target.is_rotated:
            total = unrotate(total) if source.is_rotated else rotate(total)
        _pack(total, target, reduced, FLOATS[layout_out[WIRE]])


def reduce_dequantize(packed: Tensor, out: Tensor, layout: Sequence[int]) -> None:
    """packed (T, P) -> the sums over T, out (C,)."""
    for segment in segments_in(layout):
        total = _sum(packed[:, None], segment, FLOATS[layout[WIRE]])
        total = unrotate(total) if segment.is_rotated else total
        out[segment.start : segment.start + segment.size].copy_(total[0])


def rotate(values: Tensor) -> Tensor:
    """Multiply each 32 consecutive elements of fp32 `values` (K, n) by the Hadamard matrix of +-1.

    Done twice, it multiplies values by 32. The order of the additions is part of the definition.
    """
    stride, rotated = ROTATED // 2, values
    while stride:
        first, second = rotated.reshape(-1, 2, stride).unbind(1)
        rotated = torch.stack((first + second, first - second), 1)
        stride //= 2
    return rotated.reshape(values.shape)


def unrotate(values: Tensor) -> Tensor:
    """Undo `rotate`, for fp32 `values` (K, n)."""
    return rotate(values) * (1.0 / ROTATED)


def _unpack(packed: Tensor, segment: Segment, wire: torch.dtype) -> Tensor:
    """What a segment's codes stand for (K, n): fp32, or its values as they are, in `wire`."""
    if segment.bits == RAW:
        stop = segment.data_at + segment.size * wire.itemsize
        return packed[:, segment.data_at : stop].contiguous().view(wire)
    block, blocks = BLOCK[segment.bits], num_blocks(segment.size, segment.bits)
    stop = segment.scales_at + SCALE_BYTES * blocks
    scales = packed[:, segment.scales_at : stop].contiguous().view(torch.bfloat16).float()
    width = CODE_BITS[segment.bits]
    stop = segment.data_at - (-segment.size * width // 8)
    codes = packed[:, segment.data_at : stop].contiguous().view(torch.int8)
    if width == 4:
        codes = torch.stack(((codes << 4) >> 4, codes >> 4), dim=-1).flatten(1)
    elif width == 3:
        codes = 2 * _split_in_eight(codes) - 7
    elif width == 2:
        codes = 2 * torch.stack([codes >> shift & 3 for shift in (0, 2, 4, 6)], -1).flatten(1) - 3
    padded = pad(codes[:, : segment.size].float(), (0, blocks * block - segment.size))
    values = padded.view(-1, blocks, block) * scales[..., None] + 0.0  # exact; never -0
    return values.flatten(1)[:, : segment.size]


def _pack(values: Tensor, segment: Segment, packed: Tensor, wire: torch.dtype) -> None:
    """Write a segment's values (K, n), or rotated values, to its place in the packed rows."""
    if not len(values):
        return
    if segment.bits == RAW:
        put(packed, segment.data_at, values.to(wire))
        return
    codes, scales = _quantized(values.float(), segment.bits)
    put(packed, segment.scales_at, scales)
    width = CODE_BITS[segment.bits]
    if width == 4:
        codes = pad(codes, (0, segment.size % 2))
        codes = (codes[:, 0::2] & 15) | (codes[:, 1::2] << 4)
    elif width == 3:
        codes = _eight_in_three_bytes(codes)
    elif width == 2:
        codes = sum(codes[:, first::4] << 2 * first for first in range(4))
    put(packed, segment.data_at, codes)


def put(packed: Tensor, offset: int, values: Tensor) -> None:
    """Write values (K, n) as bytes to a place in the packed rows (K, P)."""
    data = values.contiguous().view(torch.uint8)
    packed[:, offset : offset + data.shape[1]].copy_(data)


def _quantized(values: Tensor, bits: int, held: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """fp32 (K, n) -> codes int8 (K, n) and the bits of the bf16 scales, int16 (K, blocks).

    Blocks of INT8 may go on with scales that are `held`, fp32 (K, blocks).

    A code of 8 or 4 bits stands for code * scale; one of 3 bits, 0 ... 7, for (2 code - 7) * scale,
    one of 2 bits, 0 ... 3, for (2 code - 3) * scale. The scales of rotated values are positive, and
    their 4-bit codes -7 ... 7.
    """
    rows, size = values.shape
    block, blocks, top = BLOCK[bits], num_blocks(size, bits), 1 << (CODE_BITS[bits] - 1)
    by_block = pad(values, (0, blocks * block - size)).view(rows, blocks, block)
    high, low = by_block.amax(-1), by_block.amin(-1)
    extreme = torch.where(high >= -low, high, low)
    usable = extreme.isfinite() & (extreme.abs() >= TINY)
    exact = (extreme.abs() if is_rotated(bits) else extreme) * PER_EXTREME[bits]
    rounded = exact.bfloat16().float() if bits == 2 else _truncated(exact)
    scale = torch.where(usable, rounded, 1.0)
    if held is not None:
        scale = torch.where(usable, _scale_after(extreme.abs(), held), 1.0)
    if bits == 2:
        codes = _two_bits(by_block, 2 * scale[..., None])
    else:
        codes = by_block * (1.0 / scale)[..., None]
        codes = torch.round(codes * 0.5 - 0.5 if bits == 3 else codes).clamp(-top, top - 1)
        codes = codes + top if bits == 3 else codes
    codes = torch.where(usable[..., None], codes, 0.0).to(torch.int8)
    stored = torch.where(usable, scale, torch.where(extreme.isfinite(), 0.0, torch.nan))
    return codes.flatten(1)[:, :size], (stored.view(torch.int32) >> 16).to(torch.int16)


def _two_bits(values: Tensor, distance: Tensor) -> Tensor:
    """The codes 0 ... 3, of two neighbours at a distance: floor(values / distance) + 2, clamped."""
    return sum((values >= limit * distance).float() for limit in (-1, 0, 1))


def _truncated(values: Tensor) -> Tensor:
    """fp32 numbers with the 8 significant bits of bf16, the others cut off."""
    return (values.view(torch.int32) >> 16 << 16).view(torch.float32)


def _scale_after(largest: Tensor, held: Tensor) -> Tensor:
    """The scales (K, blocks) with which blocks go on, by the magnitudes of their extremes."""
    size = held.abs()
    has_scale = (size > 0) & size.isfinite()
    grown = torch.where(has_scale, held.sign(), 1.0) * _truncated(largest * GROWN)
    fitting = torch.where(largest < FEW_CODES * size, held * 0.5, held)
    return torch.where(has_scale & (largest <= MOST_CODES * size), fitting, grown)


def _sum(stacked: Tensor, segment: Segment, wire: torch.dtype) -> Tensor:
    """packed (T, K, P) -> fp32 sums (K, n) of what codes stand for, added in the order of T."""
    total = stacked.new_zeros((stacked.shape[1], segment.size), dtype=torch.float32)
    for term in stacked:
        total += _unpack(term, segment, wire)
    return total


def _eight_in_three_bytes(codes: Tensor) -> Tensor:
    """int8 0 ... 7 (K, n) -> uint8 (K, 3n/8), the first of eight codes in the lowest bits."""
    shifts = 3 * torch.arange(8, device=codes.device, dtype=torch.int32)
    words = (codes.view(len(codes), -1, 8).int() << shifts).sum(-1, dtype=torch.int32)
    three_bytes = words[..., None] >> 8 * torch.arange(3, device=codes.device, dtype=torch.int32)
    return (three_bytes & 255).to(torch.uint8).flatten(1)


def _split_in_eight(codes: Tensor) -> Tensor:
    """int8 (K, 3n/8) -> int8 0 ... 7 (K, n)."""
    three_bytes = codes.view(torch.uint8).view(len(codes), -1, 3).int()
    words = three_bytes[..., 0] | three_bytes[..., 1] << 8 | three_bytes[..., 2] << 16
    shifts = 3 * torch.arange(8, device=codes.device, dtype=torch.int32)
    return (words[..., None] >> shifts & 7).to(torch.int8).flatten(1)
