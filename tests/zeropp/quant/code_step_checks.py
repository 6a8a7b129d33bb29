"""Compare kernels of code steps with the plain-torch reference, byte by byte, on any device."""

from types import SimpleNamespace

import torch
from torch import Tensor

from tests.zeropp.quant.layout_ops import reference as quantization
from tests.zeropp.quant.packed_bytes import any_rows, bytes_of
from tests.zeropp.quant.reference_checks import UNTOUCHED, copied
from zeropp.quant import code_step_reference as reference
from zeropp.quant.code_steps import TILE, StepLayout, step_layout
from zeropp.quant.packing import BLOCK, RAW, RowLayout, num_blocks

SIZE = BLOCK[8]
RAGGED = (  # elements and bits of each segment: tiles of 3840 elements, and parts of them
    ((1,), (8,)),
    ((0, 7, 0), (8, RAW, 8)),
    ((256, 1, 130, 257), (8, RAW, 8, 8)),
    ((3, TILE + 1, 1024, 5, TILE - 1), (RAW, 8, 8, RAW, 8)),
    ((1025, 31, 0, 2 * TILE, 2047), (8, RAW, 8, 8, RAW)),
    ((2 * TILE + 25, 17, TILE), (8, 8, RAW)),
)
DISTANCES = (0.0, 0.5, 1.0, 2.5, 6.0, 300.0)  # in codes; steps of 1/2 make ties
FACTORS = (1.0, 1.0, 1.0, 0.45, 0.0, 1e-3, 30.0)


def check_steps(
    kernels, rows: Tensor, held: Tensor, layout: StepLayout, device: str = "cpu", shift: int = 0
) -> Tensor:  # fmt: skip
    """Move `held` towards `rows`, both on the CPU; returns what is held then."""
    expected = torch.empty((len(rows), layout.num_bytes), dtype=torch.uint8)
    reference.code_steps(rows, held, expected, layout.table)
    messages = torch.full_like(expected, UNTOUCHED, device=device)
    packed = held.to(device, copy=True)
    kernels.code_steps(copied(rows, device, shift), packed, messages, layout.table)
    assert torch.equal(packed.cpu(), held)
    assert torch.equal(message_bytes(messages.cpu(), layout), message_bytes(expected, layout))
    kernels.apply_code_steps(expected.to(device), packed, layout.table)
    reference.apply_code_steps(expected, held := held.clone(), layout.table)
    assert torch.equal(packed.cpu(), held)
    return held


def check_ragged(
    kernels, seed: int, reach: int, dtype: torch.dtype, wire: torch.dtype, device: str = "cpu",
    shift: int = 0,
) -> None:  # fmt: skip
    """Any codes and rows near and far from them, in one of the layouts of `RAGGED`."""
    sizes, bits = RAGGED[seed % len(RAGGED)]
    layout = step_layout(RowLayout(sizes=sizes, bits=bits, wire=wire), reach)
    held = any_codes(3, layout.rows, seed)
    for step in range(3):
        held = check_steps(kernels, rows_near(held, layout.rows, dtype, seed + 100 * step), held,
                           layout, device, shift)  # fmt: skip


def message_bytes(messages: Tensor, layout: StepLayout) -> Tensor:
    """The messages, with the same bits for every NaN among raw values."""
    pairs = zip(layout.rows.segments, layout.segments, strict=True)
    segments = [segment._replace(data_at=place.data_at) for segment, place in pairs]
    return bytes_of(messages, SimpleNamespace(segments=segments, wire=layout.rows.wire))


def any_codes(count: int, layout: RowLayout, seed: int) -> Tensor:
    """Packed rows whose blocks have large, small or no codes, and some no scale."""
    packed = quantization.quantize(any_rows(count, layout.elements, torch.float32, seed), layout, 1)
    generator = torch.Generator().manual_seed(seed)
    for segment in layout.segments:
        if segment.bits == RAW:
            continue
        blocks = num_blocks(segment.size, 8)
        largest = torch.tensor((0, 3, 57, 58, 127))
        chosen = largest[torch.randint(len(largest), (count, blocks), generator=generator)]
        ends = spread(chosen, segment.size)
        codes = (torch.rand(ends.shape, generator=generator) * (2 * ends + 1)).floor() - ends
        own = packed[:, segment.data_at : segment.data_at + segment.size]
        keep = spread(torch.rand((count, blocks), generator=generator) < 0.3, segment.size)
        own.copy_(torch.where(keep, own, codes.to(torch.int8).view(torch.uint8)))
    return packed


def rows_near(packed: Tensor, layout: RowLayout, dtype: torch.dtype, seed: int) -> Tensor:
    """Rows that are some codes away from packed rows, grow, shrink, vanish or break."""
    count = len(packed)
    rows = any_rows(count, layout.elements, torch.float32, seed + 1)
    numbers = torch.empty_like(rows)
    quantization.dequantize(packed, numbers, layout, 1)
    generator = torch.Generator().manual_seed(seed)

    def choice(values: tuple[float, ...], blocks: int, size: int) -> Tensor:
        index = torch.randint(len(values), (count, blocks), generator=generator)
        return spread(torch.tensor(values)[index], size)

    for segment in layout.segments:
        if segment.bits == RAW:
            continue
        part = slice(segment.start, segment.start + segment.size)
        blocks = num_blocks(segment.size, 8)
        stop = segment.scales_at + 2 * blocks
        scales = packed[:, segment.scales_at : stop].contiguous().view(torch.bfloat16).float()
        noise = torch.rand((count, segment.size), generator=generator) * 4 - 2
        halves = choice(DISTANCES, blocks, segment.size) * noise.round() / 2
        near = numbers[:, part] + halves * spread(scales, segment.size)
        near *= choice(FACTORS, blocks, segment.size)
        anything = torch.rand((count, blocks), generator=generator) < 0.1
        takes_any = spread(anything, segment.size) | near.isnan()
        rows[:, part] = torch.where(takes_any, rows[:, part], near)
    return rows.to(dtype)


def spread(by_block: Tensor, size: int) -> Tensor:
    """(K, B) -> (K, n): each block's number at its elements."""
    return by_block.repeat_interleave(SIZE, 1)[:, :size]


def many_segments(count: int, wire: torch.dtype) -> RowLayout:
    """Segments with steps and raw ones, as many as may take several launches of a GPU's kernels."""
    sizes = (7, 0, 256, 1025, 16, 129, 100, 64, 1)
    return RowLayout(
        sizes=tuple(sizes[i % len(sizes)] for i in range(count)),
        bits=tuple((8, RAW, 8, 8)[i % 4] for i in range(count)),
        wire=wire,
    )


def check_tiny_blocks(kernels, device: str = "cpu") -> None:
    """Rows too small for codes: blocks without codes lose their scale, others not yet.

    The scale 2^-101 is so small that it need not be halved for elements of 2^-95.
    """
    layout = step_layout(RowLayout(sizes=(2 * SIZE,), bits=(8,), wire=torch.float32), 2)
    (segment,) = layout.rows.segments
    held = torch.zeros((1, layout.rows.packed_bytes), dtype=torch.uint8)
    held[:, :4] = torch.full((2,), 2.0**-101).bfloat16().view(torch.uint8)
    held[:, segment.data_at + SIZE + 7] = 3
    held = check_steps(kernels, torch.full((1, 2 * SIZE), 2.0**-95), held, layout, device)
    assert held[0, :4].view(torch.bfloat16).tolist() == [0.0, 2.0**-101]
