"""Codes of three bits: rotation, error bounds, rows without a gradient, the order of the codes."""

import math

import pytest
import torch
from hypothesis import given

from tests.zeropp.quant.layout_ops import reference
from tests.zeropp.quant.packed_bytes import FEW, dtypes, finite_rows, scales_of, seeds
from zeropp.quant.ops import dequantize, quantize, reduce_dequantize
from zeropp.quant.packing import BLOCK, RowLayout, Segment
from zeropp.quant.reference import ROTATED, TINY, rotate

SIZE = BLOCK[3]
EPSILON = 2.0**-24  # of fp32: the largest relative error of one operation
STAGES = 5  # of additions in a rotation of 32


def layout_of_blocks(count: int) -> RowLayout:
    return RowLayout(sizes=(count * SIZE,), bits=(3,), wire=torch.float32)


def there_and_back(rows: torch.Tensor) -> torch.Tensor:
    layout = layout_of_blocks(rows.shape[1] // SIZE)
    values = torch.empty(rows.shape)
    dequantize(quantize(rows, layout), values, layout)
    return values


def first_eight(packed: torch.Tensor, segment: Segment) -> list[int]:
    """The first eight codes of the first packed row, each 0 ... 7."""
    three_bytes = packed[0, segment.data_at : segment.data_at + 3].tolist()
    bits = int.from_bytes(bytes(three_bytes), "little")
    return [bits >> 3 * i & 7 for i in range(8)]


def unrotated(values: torch.Tensor) -> torch.Tensor:
    """Rows that the rotation turns into `values`, if these are small integers times one number."""
    rows = rotate(values) / ROTATED
    assert torch.equal(rotate(rows), values)
    return rows


def test_the_rotation_is_the_hadamard_matrix():
    matrix = torch.ones(1, 1)
    while len(matrix) < ROTATED:
        matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]), matrix)
    integers = torch.randint(-99, 100, (3, 4 * ROTATED), generator=torch.Generator().manual_seed(1))
    by_matrix = integers.float().view(-1, ROTATED) @ matrix
    assert torch.equal(rotate(integers.float()), by_matrix.view(3, -1))
    assert torch.equal(rotate(rotate(integers.float())), integers * float(ROTATED))


@FEW
@given(dtypes, seeds)
def test_no_element_is_further_off_than_a_scale(dtype, seed):
    """No rotated value is further off than its scale s, so no element than (32 s) / 32 = s.

    A rotated value y reaches 64/9 (1 + 2^-7) s, the largest code stands for 7 s. Rounding adds, in
    the steps (one division, two products, and a subtraction below 4), at most 2^-20 of s, and in
    the additions of both rotations 2^-24 of 32 times the largest number each.
    """
    limit = min(1e36, torch.finfo(dtype).max)  # 32 times as much is finite
    rows = finite_rows(2, 4 * SIZE, dtype, seed).clamp(-limit, limit)
    exact, actual = rows.double(), there_and_back(rows).double()
    layout = layout_of_blocks(4)
    scales = scales_of(quantize(rows, layout), *layout.segments)
    largest = exact.abs().view(2, 4, SIZE).amax(-1).repeat_interleave(SIZE, 1)
    rounding = 2 * STAGES * EPSILON * ROTATED * largest
    bound = torch.where(scales == 0, TINY, scales * (1 + 2.0**-20) + rounding)
    assert ((actual - exact).abs() <= bound).all()
    assert (scales <= 9 / 64 * ROTATED * largest * (1 + STAGES * EPSILON)).all()


def test_the_error_of_gaussian_numbers_is_that_of_even_steps_and_keeps_their_size():
    """Errors spread evenly over -s ... s have the variance s^2 / 3; the rotation keeps it."""
    rows = torch.randn(8, 256 * SIZE, generator=torch.Generator().manual_seed(3))
    layout = layout_of_blocks(256)
    values, scales = there_and_back(rows), scales_of(quantize(rows, layout), *layout.segments)
    expected = (scales**2).mean().item() / 3 / ROTATED  # rotated values are 32^0.5 times as large
    assert ((values - rows) ** 2).mean().item() == pytest.approx(expected, rel=0.02)
    gain = (values * rows).sum() / (rows * rows).sum()
    assert abs(gain - 1) < 0.005  # what the project demands of an averaged gradient


def test_rows_without_a_gradient_stay_zero():
    rows = torch.randn(2, 6 * SIZE, generator=torch.Generator().manual_seed(5))
    untouched = torch.tensor([1, 2, 4])
    rows.view(2, 6, SIZE)[:, untouched] = 0
    blocks = there_and_back(rows).view(2, 6, SIZE)
    assert (blocks[:, untouched].view(torch.int32) == 0).all()  # never -0
    assert (blocks[:, [0, 3, 5]] != 0).any(-1).all()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 2.0**127])
def test_a_number_that_is_not_finite_makes_its_block_nan_and_no_other(value):
    """As does one whose multiple by 32 is not: here two of 2^127 add up to infinity."""
    rows = torch.randn(1, 3 * SIZE, generator=torch.Generator().manual_seed(6))
    clean = there_and_back(rows)
    rows[0, SIZE : SIZE + 2] = value
    blocks, before = there_and_back(rows).view(3, SIZE), clean.view(3, SIZE)
    assert blocks[1].isnan().all()
    assert torch.equal(blocks[[0, 2]], before[[0, 2]])


def test_a_block_below_tiny_becomes_zeros():
    rows = torch.zeros(1, 2 * SIZE)
    rows[0, 3], rows[0, SIZE + 3] = TINY * 0.999, TINY
    blocks = there_and_back(rows).view(2, SIZE)
    assert (blocks[0].view(torch.int32) == 0).all()
    assert blocks[1, 3] > 0


def test_sums_are_rotated_back_once():
    """Equal to fp32's rounding of 4 sums and 5 additions of up to 32 values, each below 7 s."""
    rows = torch.randn(4, 2 * SIZE, generator=torch.Generator().manual_seed(8))
    layout = layout_of_blocks(2)
    packed, total = quantize(rows, layout), torch.empty(2 * SIZE)
    reduce_dequantize(packed, total, layout)
    bound = 9 * EPSILON * 4 * 7 * scales_of(packed, *layout.segments).max()
    assert ((total - there_and_back(rows).double().sum(0)).abs() <= 2 * bound).all()


def test_the_first_of_eight_codes_is_in_the_lowest_bits():
    """Codes 0 ... 7 stand for -7, -5 ... 7 scales; 64/9 scales are the largest rotated value."""
    values = torch.zeros(1, SIZE)
    values[0, :8] = torch.arange(-7.0, 8.0, 2.0)
    values[0, 8] = -64 / 9 * (1 + 2.0**-9)  # so that the scale, truncated, is 1
    layout = layout_of_blocks(1)
    packed = quantize(rotate(values) / ROTATED, layout)
    (segment,) = layout.segments
    assert scales_of(packed, segment).unique().item() == 1
    assert first_eight(packed, segment) == list(range(8))


def test_ties_between_two_codes_go_to_the_even_one():
    """Multiples of two scales are halfway; 4.5 scales to 64/9 become the largest code."""
    scale = 9.0 / 64 * 64  # of a largest value of 64, exactly
    multiples = torch.tensor([-6, -4, -2, 0, 2, 4, 6]) * scale
    values = torch.zeros(1, SIZE)
    values[0, :7], values[0, 7] = multiples, 64
    rows = unrotated(values)
    layout = layout_of_blocks(1)
    packed = quantize(rows, layout)
    assert scales_of(packed, *layout.segments).unique().item() == scale
    (segment,) = layout.segments
    # -3.5 -2.5 -1.5 -0.5 0.5 1.5 2.5 round to -4 -2 -2 0 0 2 2
    assert [code - 4 for code in first_eight(packed, segment)[:7]] == [-4, -2, -2, 0, 0, 2, 2]
    assert torch.equal(packed, reference.quantize(rows, layout, 1))


def test_a_long_segment_takes_three_and_a_quarter_bits_for_each_element():
    assert layout_of_blocks(1 << 10).packed_bytes * 8 == 3.25 * (SIZE << 10)


def test_a_segment_that_is_not_whole_blocks_is_refused():
    with pytest.raises(ValueError, match="65 elements of 3 bits: give a multiple of 64"):
        RowLayout(sizes=(65,), bits=(3,), wire=torch.float32)
