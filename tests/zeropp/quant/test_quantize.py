"""The arithmetic of quantization: error bounds, zeros, non-finite values, order of sums."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.zeropp.quant.packed_bytes import (
    FEW,
    bits_of,
    dtypes,
    finite_rows,
    layouts,
    ragged_layouts,
    scales_of,
    seeds,
    segment_sizes,
)
from zeropp.quant.ops import dequantize, quantize, reduce_dequantize, reduce_quantize
from zeropp.quant.packing import BLOCK, FLOATS, RAW, RowLayout
from zeropp.quant.reference import TINY

HALF = 0.5 + 2.0**-13  # of a step; 1/scale and its product are rounded: 129 * 2 * 2^-24 of a step
LARGEST_LOSS = 2.0**-7  # a scale is cut off to 8 significant bits
NOT_FINITE = (math.nan, math.inf, -math.inf)
quantized = st.sampled_from((4, 8))


def there_and_back(rows: torch.Tensor, layout: RowLayout, dtype=torch.float32) -> torch.Tensor:
    out = torch.empty(rows.shape, dtype=dtype)
    dequantize(quantize(rows, layout), out, layout)
    return out


def one_segment(size: int, bits: int, wire: torch.dtype = torch.float32) -> RowLayout:
    return RowLayout(sizes=(size,), bits=(bits,), wire=wire)


def blocks_of(values: torch.Tensor, bits: int) -> list[torch.Tensor]:
    return list(values.split(BLOCK[bits], 1)) if values.numel() else []


@FEW
@given(layouts(quantized), dtypes, seeds)
def test_the_error_is_half_a_step_or_what_the_last_code_cuts_off(layout, dtype, seed):
    """A step is |scale|, elements reach top*(1 + 2^-7) of them, codes -top ... top-1 (top = 2^b/2).

    So, in steps: an element of the extreme's sign loses at most top*2^-7 beyond half a step, that
    is 1 (INT8) or 1/16 (INT4) in all; one of the other sign at most 2 (INT8) or 1 + 1/16 (INT4).
    """
    rows = finite_rows(3, layout.elements, dtype, seed)
    packed, values = quantize(rows, layout), there_and_back(rows, layout)
    for segment in layout.segments:
        part = slice(segment.start, segment.start + segment.size)
        scales, exact, actual = scales_of(packed, segment), rows[:, part].double(), values[:, part]
        top = 1 << (segment.bits - 1)
        zeros = scales == 0
        assert (exact[zeros].abs() < TINY).all() and (actual[zeros] == 0).all()
        steps = torch.where(zeros, 0.0, exact / scales)
        assert (steps.abs() <= top * (1 + LARGEST_LOSS)).all()
        beyond = torch.maximum(-top - steps, steps - (top - 1))
        bound = torch.where(beyond > 0.5, beyond, HALF) * scales.abs()
        error = torch.where(zeros, 0.0, (actual.double() - exact).abs())
        assert (error <= bound * (1 + 1e-12)).all()
        assert (beyond <= 1 + top * LARGEST_LOSS).all()


@FEW
@given(segment_sizes, quantized, dtypes, seeds)
def test_the_extreme_keeps_its_sign_and_nothing_is_larger_than_it(size, bits, dtype, seed):
    rows = finite_rows(2, size, dtype, seed)
    values = there_and_back(rows, one_segment(size, bits))
    for exact, actual in zip(blocks_of(rows.float(), bits), blocks_of(values, bits), strict=True):
        high, low = exact.amax(1, keepdim=True), exact.amin(1, keepdim=True)
        extreme = torch.where(high >= -low, high, low)
        assert (actual.abs() <= extreme.abs()).all()
        is_extreme = (exact == extreme) & (extreme.abs() >= TINY)
        assert (torch.where(is_extreme, actual / extreme, 1.0) > 1 - LARGEST_LOSS).all()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("bits", [4, 8])
def test_the_largest_numbers_stay_finite_in_their_own_type(bits, dtype):
    largest = torch.finfo(dtype).max
    rows = torch.tensor([[largest, -largest, largest / 2, 0.0, 1.0]], dtype=dtype)
    values = there_and_back(rows, one_segment(5, bits), dtype).double()
    top = 1 << (bits - 1)
    step = largest / top
    assert values[0, 0] == pytest.approx(largest, rel=LARGEST_LOSS)
    assert -largest <= values[0, 1] <= -largest + step * (1 + top * LARGEST_LOSS)
    assert (values[0, 3:] == 0).all()


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("value", [2.0**-149, 1e-40, 2.0**-126, TINY / 2, -TINY * 0.999])
def test_a_block_below_tiny_becomes_zeros_and_its_neighbours_stay(bits, value):
    size = BLOCK[bits]
    rows = torch.ones(1, 3 * size)
    rows[:, size : 2 * size] = value
    values = there_and_back(rows, one_segment(3 * size, bits))
    assert (bits_of(values[:, size : 2 * size]) == 0).all()
    torch.testing.assert_close(values[:, :size], rows[:, :size], rtol=LARGEST_LOSS, atol=0)
    assert torch.equal(values[:, :size], values[:, 2 * size :])


@pytest.mark.parametrize("bits", [4, 8])
def test_from_tiny_on_a_block_is_kept(bits):
    rows = torch.tensor([[TINY, -TINY / 2, 0.0]])
    assert torch.equal(there_and_back(rows, one_segment(3, bits)), rows)


@FEW
@given(layouts(quantized), dtypes, dtypes, seeds)
def test_zeros_stay_zeros_and_are_never_negative(layout, dtype, out_dtype, seed):
    rows = finite_rows(2, layout.elements, dtype, seed)
    values = there_and_back(rows, layout, out_dtype)
    assert (values[rows == 0] == 0).all()
    if out_dtype == torch.float32:
        assert not values[values == 0].signbit().any()


@FEW
@given(layouts(quantized), dtypes, seeds)
def test_quantizing_again_changes_nothing(layout, dtype, seed):
    packed = quantize(finite_rows(2, layout.elements, dtype, seed), layout)
    values = torch.empty(2, layout.elements)
    dequantize(packed, values, layout)
    assert torch.equal(quantize(values, layout), packed)


@FEW
@given(layouts(st.just(RAW)), seeds)
def test_raw_segments_are_unchanged(layout, seed):
    rows = finite_rows(2, layout.elements, layout.wire, seed)
    assert torch.equal(bits_of(there_and_back(rows, layout, layout.wire)), bits_of(rows))
    wide = finite_rows(2, layout.elements, torch.float32, seed)
    expected = wide.to(layout.wire).float()
    assert torch.equal(bits_of(there_and_back(wide, layout)), bits_of(expected))


@FEW
@given(layouts(), dtypes, seeds, st.data())
def test_a_non_finite_number_makes_its_block_non_finite_and_no_other(layout, dtype, seed, data):
    if not layout.elements:
        return
    rows = finite_rows(2, layout.elements, dtype, seed)
    rows = rows.clamp(-6e4, 6e4)  # finite in every wire
    place = data.draw(st.integers(0, layout.elements - 1))
    row, bad = data.draw(st.integers(0, 1)), data.draw(st.sampled_from(NOT_FINITE))
    expected = there_and_back(rows, layout)
    rows[row, place] = bad
    values = there_and_back(rows, layout)
    (segment,) = [s for s in layout.segments if s.start <= place < s.start + s.size]
    block = BLOCK.get(segment.bits, 1)
    first = segment.start + (place - segment.start) // block * block
    last = min(first + block, segment.start + segment.size)
    assert not values[row, first:last].isfinite().any()
    if segment.bits != RAW:
        assert values[row, first:last].isnan().all()
    values[row, first:last] = expected[row, first:last]
    assert torch.equal(bits_of(values), bits_of(expected))


@pytest.mark.parametrize("bad", NOT_FINITE)
@pytest.mark.parametrize("bits", [(8, 4), (4, 8), (16, 4), (8, 16)])
def test_overflow_of_one_term_is_in_the_sum_of_its_block_alone(bits, bad):
    size = 4 * BLOCK[8]
    source, onto = (RowLayout(sizes=(size,), bits=(bit,), wire=torch.float16) for bit in bits)
    rows = torch.ones(6, size)  # 3 terms of 2 rows
    rows[3, 2 * BLOCK[8] + 3] = bad  # term 1, row 1
    packed = quantize(rows, source)
    values = torch.empty(2, size)
    dequantize(reduce_quantize(packed, source, onto, terms=3), values, onto)
    wide = max(BLOCK.get(bit, 1) for bit in bits)
    first = (2 * BLOCK[8] + 3) // wide * wide
    assert not values[1, first : first + wide].isfinite().any()
    values[1, first : first + wide] = 3
    torch.testing.assert_close(values, torch.full_like(values, 3), rtol=LARGEST_LOSS, atol=0)


def test_a_sum_beyond_fp32_and_a_value_beyond_the_wire_are_not_finite():
    wide, narrow = one_segment(3, 16), one_segment(3, 8)
    packed = quantize(torch.full((2, 3), 3e38), wide)
    out = torch.empty(1, 3)
    dequantize(reduce_quantize(packed, wide, narrow, terms=2), out, narrow)
    assert out.isnan().all()
    assert there_and_back(torch.full((1, 3), 7e4), one_segment(3, 16, torch.float16)).isinf().all()


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (0, 2, 1)])
def test_terms_are_added_in_their_order_in_fp32(order):
    """(1e8 + 3) - 1e8 is 0 and (1e8 - 1e8) + 3 is 3; a wider sum would give 3 both times."""
    numbers = [torch.tensor((1e8, 3.0, -1e8))[index] for index in order]
    expected = (numbers[0] + numbers[1]) + numbers[2]
    layout = one_segment(70, 16)
    packed = quantize(torch.stack(numbers)[:, None].repeat(1, 70), layout)
    total = torch.empty(70)
    reduce_dequantize(packed, total, layout)
    assert (total == expected).all()
    rows = torch.empty(1, 70)
    dequantize(reduce_quantize(packed, layout, layout, terms=3), rows, layout)
    assert (rows == expected).all()


@FEW
@given(layouts(st.sampled_from((4, 8, RAW))), dtypes, seeds, st.integers(1, 9))
def test_sums_are_those_of_the_dequantized_rows(layout, dtype, seed, terms):
    """Those of rotated elements are rotated back once: tests/zeropp/quant/test_rotated.py."""
    rows = finite_rows(terms * 2, layout.elements, dtype, seed)
    packed, values = quantize(rows, layout), there_and_back(rows, layout)
    expected = torch.zeros(2, layout.elements)
    for term in values.view(terms, 2, layout.elements):
        expected = expected + term
    exact = RowLayout(sizes=layout.sizes, bits=(RAW,) * len(layout.sizes), wire=torch.float32)
    actual = torch.empty_like(expected)
    dequantize(reduce_quantize(packed, layout, exact, terms=terms), actual, exact)
    assert torch.equal(bits_of(actual), bits_of(expected))
    slice_sum = torch.empty(layout.elements, dtype=dtype)
    reduce_dequantize(packed.view(terms, 2, -1)[:, 1].contiguous(), slice_sum, layout)
    assert torch.equal(bits_of(slice_sum), bits_of(expected[1].to(dtype)))


@pytest.mark.parametrize(("ranks", "nodes"), [(1, 4), (2, 2), (2, 3), (4, 2)])
def test_slices_are_reordered_for_the_two_hops(ranks, nodes):
    """Input row n*R + r is position n*R + r of the route; output row r*N + n goes to rank r."""
    for layout in ragged_layouts(torch.float32):
        rows = finite_rows(ranks * nodes, layout.elements, torch.float32, 2)
        turned = [rows[n * ranks + r] for r in range(ranks) for n in range(nodes)]
        packed = quantize(rows, layout, fold=ranks)
        assert torch.equal(packed, quantize(torch.stack(turned), layout))
        out = torch.empty_like(rows)
        dequantize(packed, out, layout, fold=ranks)
        assert torch.equal(bits_of(out), bits_of(there_and_back(rows, layout)))


@pytest.mark.parametrize(("bits", "worst"), [(8, 0.0075), (4, 0.115)])
def test_gaussian_numbers_lose_what_the_documentation_says(bits, worst):
    rows = torch.randn(1, 1 << 18, generator=torch.Generator().manual_seed(3))
    values = there_and_back(rows, one_segment(1 << 18, bits))
    assert 0.85 * worst < (values - rows).norm() / rows.norm() < worst
    assert (values * rows).sum() / rows.square().sum() == pytest.approx(1, abs=0.002)
