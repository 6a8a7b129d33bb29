"""The layout of a packed row: its size, alignment, gaps, and the order of the codes."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.zeropp.quant.packed_bytes import FEW, dtypes, finite_rows, layouts, seeds
from zeropp.quant.ops import dequantize, quantize
from zeropp.quant.packing import (
    ALIGN,
    BLOCK,
    CODE_BITS,
    FLOATS,
    RAW,
    ROTATED_4,
    SCALE_BYTES,
    RowLayout,
    num_blocks,
    row_layout,
    segments_in,
)


def byte_ranges(layout: RowLayout) -> list[tuple[int, int]]:
    """(first, end) of the bytes that hold raw values, scales and codes."""
    places = []
    for segment in layout.segments:
        start, bits = segment.data_at, segment.bits
        if bits == RAW:
            places.append((start, start + segment.size * layout.wire.itemsize))
            continue
        scales = SCALE_BYTES * num_blocks(segment.size, bits)
        places.append((segment.scales_at, segment.scales_at + scales))
        places.append((start, start + (segment.size * CODE_BITS[bits] + 7) // 8))
    return sorted(places)


def test_the_size_of_a_row_counted_by_hand():
    layout = RowLayout(sizes=(5, 300, 129, 0), bits=(16, 8, 4, 8), wire=torch.bfloat16)
    assert layout.packed_bytes == 16 + 16 + 304 + 80
    scales = [(16, 16 + 2 * 2), (20, 20 + 2 * 2)]
    assert byte_ranges(layout) == [(0, 5 * 2), *scales, (32, 32 + 300), (336, 336 + 65)]
    assert layout.elements == 434


@pytest.mark.parametrize(
    ("bits", "wire", "bytes_per_element"),
    [
        (8, torch.float32, 1 + 2 / 256),
        (4, torch.float32, 0.5 + 2 / 128),
        (ROTATED_4, torch.float32, 0.5 + 2 / 128),
        (3, torch.float32, 3.25 / 8),
        (2, torch.float32, 0.25 + 2 / 128),
        (16, torch.float32, 4),
        (16, torch.float16, 2),
    ],
)
def test_bytes_per_element_of_a_long_segment(bits, wire, bytes_per_element):
    layout = RowLayout(sizes=(1 << 16,), bits=(bits,), wire=wire)
    assert layout.packed_bytes == bytes_per_element * (1 << 16)


@FEW
@given(layouts())
def test_parts_are_aligned_and_do_not_overlap_and_fill_the_row(layout):
    places = byte_ranges(layout)
    assert layout.packed_bytes % ALIGN == 0
    for (_, end), (start, _) in zip(places, places[1:], strict=False):
        assert end <= start < end + ALIGN
    assert not places or places[0][0] == 0 and 0 <= layout.packed_bytes - places[-1][1] < ALIGN
    for segment in layout.segments:
        assert segment.bits == RAW or segment.data_at % ALIGN == 0
    starts = [sum(layout.sizes[:i]) for i, size in enumerate(layout.sizes) if size]
    assert [segment.start for segment in layout.segments] == starts


@FEW
@given(layouts(), dtypes, seeds, st.integers(1, 3))
def test_unused_bytes_are_zeros(layout, dtype, seed, count):
    packed = quantize(finite_rows(count, layout.elements, dtype, seed), layout)
    assert packed.shape == (count, layout.packed_bytes)
    for start, end in byte_ranges(layout):
        packed[:, start:end] = 0
    assert not packed.any()


def test_the_first_of_two_codes_is_in_the_lower_half():
    layout = RowLayout(sizes=(3,), bits=(4,), wire=torch.float32)
    packed = quantize(torch.tensor([[-8.0, 7.0, -1.0]]), layout)
    (segment,) = layout.segments
    assert packed[0, segment.scales_at : segment.scales_at + 2].tolist() == [0x80, 0x3F]  # 1.0
    assert packed[0, segment.data_at : segment.data_at + 2].tolist() == [0x78, 0x0F]


def test_a_positive_extreme_gives_a_negative_scale():
    layout = RowLayout(sizes=(2,), bits=(8,), wire=torch.float32)
    packed = quantize(torch.tensor([[128.0, -1.0]]), layout)
    (segment,) = layout.segments
    assert packed[0, segment.scales_at : segment.scales_at + 2].tolist() == [0x80, 0xBF]  # -1.0
    assert packed[0, segment.data_at : segment.data_at + 2].tolist() == [0x80, 0x01]


@pytest.mark.parametrize("bits", [4, 8])
def test_blocks_begin_anew_with_every_segment(bits):
    """A small segment beside a large one keeps its own scale (D4: 10% error otherwise)."""
    layout = RowLayout(sizes=(5, BLOCK[bits]), bits=(bits, bits), wire=torch.float32)
    rows = torch.cat((torch.full((1, 5), 1e-6), torch.full((1, BLOCK[bits]), 1e6)), 1)
    out = torch.empty_like(rows)
    dequantize(quantize(rows, layout), out, layout)
    torch.testing.assert_close(out, rows, rtol=2**-7, atol=0)


@FEW
@given(layouts())
def test_a_table_has_all_of_a_layout(layout):
    elements, packed_bytes, wire, count, *_ = layout.table
    assert (elements, packed_bytes) == (layout.elements, layout.packed_bytes)
    assert FLOATS[wire] == layout.wire
    segments = tuple(segments_in(layout.table))
    assert segments == layout.segments and count == len(segments)


def test_the_same_arguments_give_the_same_layout():
    arguments = ((3, 4), (8, 16), torch.float16)
    assert row_layout(*arguments) is row_layout(*arguments)


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"sizes": (3,)}, ValueError, "1 sizes, 2 bits"),
        ({"sizes": (3, -1)}, ValueError, "-1 elements"),
        ({"bits": (8, 5)}, ValueError, "bits 5: a segment has 2, 3, 4, 8, 36 .* or 16"),
        ({"sizes": (33, 4), "bits": (2, 16)}, ValueError, "33 elements of 2 bits, rotated: .* 32"),
        ({"sizes": (65, 4), "bits": (3, 16)}, ValueError, "65 elements of 3 bits, rotated: .* 64"),
        ({"sizes": (33, 4), "bits": (ROTATED_4, 16)}, ValueError, "33 elements of 4 bits, rotated"),
        ({"wire": torch.float64}, TypeError, "torch.float64: give"),
        ({"wire": torch.int8}, TypeError, "torch.int8: give"),
    ],
)
def test_invalid_layouts_are_refused(changed, error, message):
    right = {"sizes": (3, 4), "bits": (8, 16), "wire": torch.bfloat16}
    with pytest.raises(error, match=message):
        RowLayout(**right | changed)
