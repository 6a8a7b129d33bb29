"""Steps of codes in plain PyTorch, on any device: the definition that all kernels match.

Shapes: K rows, C elements of a row, P bytes of a packed row, S bytes of a message. `layout` is a
`StepLayout.table`. docs/numerics.md explains the arithmetic.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from zeropp.quant.code_steps import (
    COUNT_BYTES,
    COUNTED,
    COUNTS,
    PLANES,
    RESCALED,
    TILE,
    StepSegment,
    places_in,
    rows_end,
    step_bytes,
)
from zeropp.quant.packing import (
    BLOCK,
    FLOATS,
    RAW,
    SCALE_BYTES,
    WIRE,
    Segment,
    num_blocks,
    segments_in,
)
from zeropp.quant.reference import TINY, put

TOP = 128  # codes are -TOP ... TOP - 1
MOST = 129  # codes that the largest element may need: a truncated scale begins with up to these
GROWN = 1.25 / 127  # of the largest element: the scale of a block that outgrew its own
SMALL = 58  # codes, 45% of TOP: a block that needs no larger ones doubles them
SIZE = BLOCK[8]


def code_steps(rows: Tensor, packed: Tensor, messages: Tensor, layout: Sequence[int]) -> None:
    """rows (K, C), and what the others hold of them, packed (K, P) -> messages (K, S)."""
    messages.zero_()
    counts = torch.zeros((len(rows), COUNTS), dtype=torch.int32, device=rows.device)
    reach, pairs = _segments(layout)
    for segment, place in pairs:
        values = rows[:, segment.start : segment.start + segment.size]
        if segment.bits == RAW:
            put(messages, place.data_at, values.to(FLOATS[layout[WIRE]]))
            continue
        codes, scales = _read(packed, segment)
        blocks = _by_block(values.float())
        new_scales = _fitting_scales(blocks, codes, scales, reach)
        moved = _remapped(codes, scales, new_scales)
        distance = _nearest_codes(blocks, new_scales) - moved
        for index, steps in enumerate(COUNTED):
            counts[:, index] += (distance.abs() > steps).sum((1, 2), dtype=torch.int32)
        changed = _bits(scales) != _bits(new_scales)
        counts[:, RESCALED] += changed.sum(1, dtype=torch.int32)
        put(messages, place.scales_at, _bits(new_scales))
        steps = distance.clamp(-reach, reach).flatten(1)[:, : segment.size]
        put(messages, place.data_at, _packed_steps(steps, reach))
    put(messages, 0, counts)


def apply_code_steps(messages: Tensor, packed: Tensor, layout: Sequence[int]) -> None:
    """Move the codes of packed (K, P) by the steps of messages (K, S), in place."""
    reach, pairs = _segments(layout)
    width = FLOATS[layout[WIRE]].itemsize
    for segment, place in pairs:
        if segment.bits == RAW:
            stop = place.data_at + segment.size * width
            put(packed, segment.data_at, messages[:, place.data_at : stop])
            continue
        codes, scales = _read(packed, segment)
        stop = place.scales_at + SCALE_BYTES * num_blocks(segment.size, 8)
        new_scales = _scales(messages[:, place.scales_at : stop])
        stop = place.data_at + step_bytes(segment.size, reach)
        steps = _unpacked_steps(messages[:, place.data_at : stop], segment.size, reach)
        codes = _remapped(codes, scales, new_scales).flatten(1)[:, : segment.size] + steps
        put(packed, segment.scales_at, _bits(new_scales))
        put(packed, segment.data_at, codes.to(torch.int8))


def read_counts(messages: Tensor) -> Tensor:
    """The counts at the beginning of messages (K, S), int32 (K, COUNTS)."""
    return messages[:, :COUNT_BYTES].contiguous().view(torch.int32)


def _segments(layout: Sequence[int]) -> tuple[int, Iterator[tuple[Segment, StepSegment]]]:
    reach, places = places_in(layout)
    return reach, zip(segments_in(layout[: rows_end(layout)]), places, strict=True)


def _fitting_scales(blocks: Tensor, codes: Tensor, scales: Tensor, reach: int) -> Tensor:
    """The scales that blocks (K, B, 256) go on with.

    A scale stays until the largest element needs more codes than there are, or all codes are small
    and would be where they belong with half of it. A block without a scale gets one of few codes,
    and finer ones in the next steps.
    """
    largest, size = blocks.abs().amax(-1), scales.abs()
    is_alive = (size > 0) & scales.isfinite()
    half = torch.where(is_alive, scales, 1.0) * 0.5
    distance = (_nearest_codes(blocks, half) - 2.0 * codes).abs().amax(-1)
    reached = codes.abs().amax(-1)
    grown = torch.copysign(_truncated(largest * GROWN), scales)
    shrinks = (largest < SMALL * size) & (reached < SMALL) & (distance <= reach)
    fitting = torch.where(shrinks, scales * 0.5, scales)
    fitting = torch.where(largest > MOST * size, grown, fitting)
    fitting = torch.where(is_alive, fitting, _truncated(largest * (1.0 / reach)))
    is_zero = (largest < TINY) & ((reached == 0) | ~is_alive)
    fitting = torch.where(is_zero, 0.0, fitting)
    return torch.where(largest.isfinite(), fitting, torch.nan)


def _remapped(codes: Tensor, scales: Tensor, new_scales: Tensor) -> Tensor:
    """codes (K, B, 256) in steps of new scales (K, B); 0 where either scale is 0 or NaN."""
    usable = (scales.abs() > 0) & (new_scales.abs() > 0)
    ratio = torch.where(usable, scales / new_scales, 0.0)
    stays = _bits(scales) == _bits(new_scales)
    ratio = torch.where(stays & usable, 1.0, ratio)
    return torch.round(codes * ratio[..., None]).clamp(-TOP, TOP - 1)


def _nearest_codes(blocks: Tensor, scales: Tensor) -> Tensor:
    """The codes of blocks (K, B, 256) by scales (K, B), as fp32; 0 where a scale is 0 or NaN."""
    usable = (scales.abs() > 0)[..., None]
    inverse = 1.0 / torch.where(usable[..., 0], scales, 1.0)
    nearest = torch.round(blocks * inverse[..., None]).clamp(-TOP, TOP - 1)
    return torch.where(usable, nearest, 0.0)


def _packed_steps(steps: Tensor, reach: int) -> Tensor:
    """steps (K, n) as fp32 -> uint8 (K, step_bytes(n))."""
    digits = (steps + reach).to(torch.int32)
    return torch.cat([_packed_tile(tile, reach) for tile in digits.split(TILE, 1)], 1)


def _packed_tile(digits: Tensor, reach: int) -> Tensor:
    planes, base = PLANES[reach], 2 * reach + 1
    lanes = -(-digits.shape[1] // planes)
    digits = pad(digits, (0, planes * lanes - digits.shape[1]), value=reach)
    if reach == 2:
        numbers = _number(digits.view(-1, 8, 3, lanes), base, dim=2)  # (K, 8, lanes)
        above = numbers[:, 7:] >> torch.arange(7, device=digits.device)[:, None] & 1
        return (numbers[:, :7] | above << 7).to(torch.uint8).flatten(1)
    number = _number(digits.view(-1, planes, lanes), base, dim=1)  # (K, lanes)
    if reach == 4:
        number = torch.stack((number & 255, number >> 8), -1).flatten(1)
    return number.to(torch.uint8)


def _unpacked_steps(data: Tensor, size: int, reach: int) -> Tensor:
    """uint8 (K, step_bytes(n)) -> steps (K, n) as fp32."""
    parts = []
    for start in range(0, size, TILE):
        elements = min(TILE, size - start)
        first, stop = step_bytes(start, reach), step_bytes(start + elements, reach)
        parts.append(_unpacked_tile(data[:, first:stop].to(torch.int32), reach)[:, :elements])
    return (torch.cat(parts, 1) - reach).float()


def _unpacked_tile(data: Tensor, reach: int) -> Tensor:
    base = 2 * reach + 1
    if reach == 2:
        data = data.view(len(data), 7, -1)
        above = (data >> 7 << torch.arange(7, device=data.device)[:, None]).sum(1, keepdim=True)
        numbers = torch.cat((data & 127, above.to(torch.int32)), 1)  # (K, 8, lanes)
        return _digits(numbers, base, 3, dim=2).flatten(1)
    if reach == 4:
        data = data[:, 0::2] | data[:, 1::2] << 8
    return _digits(data, base, PLANES[reach], dim=1).flatten(1)


def _number(digits: Tensor, base: int, dim: int) -> Tensor:
    number = torch.zeros_like(digits.select(dim, 0))
    for index in reversed(range(digits.shape[dim])):
        number = number * base + digits.select(dim, index)
    return number


def _digits(number: Tensor, base: int, count: int, dim: int) -> Tensor:
    return torch.stack([number // base**index % base for index in range(count)], dim)


def _by_block(values: Tensor) -> Tensor:
    """(K, n) -> (K, B, 256), padded with zeros."""
    blocks = num_blocks(values.shape[1], 8)
    return pad(values, (0, blocks * SIZE - values.shape[1])).view(len(values), blocks, SIZE)


def _read(packed: Tensor, segment: Segment) -> tuple[Tensor, Tensor]:
    """A segment's codes (K, B, 256) and scales (K, B), as fp32."""
    codes = packed[:, segment.data_at : segment.data_at + segment.size].view(torch.int8).float()
    stop = segment.scales_at + SCALE_BYTES * num_blocks(segment.size, 8)
    return _by_block(codes), _scales(packed[:, segment.scales_at : stop])


def _scales(data: Tensor) -> Tensor:
    return data.contiguous().view(torch.bfloat16).float()


def _truncated(values: Tensor) -> Tensor:
    return (values.view(torch.int32) >> 16 << 16).view(torch.float32)


def _bits(scales: Tensor) -> Tensor:
    return (scales.view(torch.int32) >> 16).to(torch.int16)
