"""Codes of two to four bits of rotated elements: error bounds, gain, zeros, order of codes."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.zeropp.quant.layout_ops import reference
from tests.zeropp.quant.packed_bytes import FEW, any_rows, dtypes, finite_rows, scales_of, seeds
from zeropp.quant.ops import dequantize, quantize, reduce_dequantize, reduce_quantize
from zeropp.quant.packing import BLOCK, CODE_BITS, ROTATED, ROTATED_4, RowLayout, Segment
from zeropp.quant.reference import TINY, rotate

SIZE = 128  # elements: a block of 4 bits, two of 3
EPSILON = 2.0**-24  # of fp32: the largest relative error of one operation
STAGES = 5  # of additions in a rotation of 32
# Scales between a rotated value and what its code stands for.
WORST = {ROTATED_4: 0.5, 3: 1.0, 2: 2 + 5 * 2.0**-8}
LARGEST = {ROTATED_4: 7, 3: 64 / 9, 2: 5}  # scales that a block's largest rotated value has
UP = {ROTATED_4: 0, 3: 0, 2: 2.0**-8}  # of a scale: what it may grow when it becomes bf16
STEP = {ROTATED_4: 1, 3: 2}  # scales between neighbouring codes
LOWEST = {3: 4, 2: 2}  # -LOWEST is the code whose bits are 0
both = pytest.mark.parametrize("bits", [ROTATED_4, 3])
every = pytest.mark.parametrize("bits", [ROTATED_4, 3, 2])
COLUMNS, OUTLIERS, FACTOR = 512, 8, 30


def layout_of(elements: int, bits: int) -> RowLayout:
    return RowLayout(sizes=(elements,), bits=(bits,), wire=torch.float32)


def there_and_back(rows: torch.Tensor, bits: int) -> torch.Tensor:
    layout, values = layout_of(rows.shape[1], bits), torch.empty(rows.shape)
    dequantize(quantize(rows, layout), values, layout)
    return values


def scales(rows: torch.Tensor, bits: int) -> torch.Tensor:
    """The scale of each element."""
    layout = layout_of(rows.shape[1], bits)
    return scales_of(quantize(rows, layout), *layout.segments)


def draw(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def codes(packed: torch.Tensor, segment: Segment, count: int) -> list[int]:
    """The first codes of the first packed row, as unsigned integers."""
    width = CODE_BITS[segment.bits]
    data = packed[0, segment.data_at : segment.data_at + count * width // 8].tolist()
    bits = int.from_bytes(bytes(data), "little")
    return [bits >> width * i & (1 << width) - 1 for i in range(count)]


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
@given(st.sampled_from((ROTATED_4, 3, 2)), dtypes, seeds)
def test_no_element_is_further_off_than_half_the_distance_of_two_codes(bits, dtype, seed):
    """No rotated value is further off than w scales s, so no element than (32 w s) / 32 = w s.

    With 4 bits a rotated value reaches 7 (1 + 2^-7) s, which rounds to the largest code, 7: w is
    half a step. With 3 bits it reaches 64/9 (1 + 2^-7) s, the largest code stands for 7 s: w is 1.
    With 2 bits it reaches 5 (1 + 2^-8) s, the largest code stands for 3 s. Rounding adds, in the
    steps (one division, two products, a subtraction below 8), at most 2^-20 of s, and in the
    additions of both rotations 2^-24 of 32 times the largest number each.
    """
    limit = min(1e36, torch.finfo(dtype).max)  # 32 times as much is finite
    rows = finite_rows(2, 4 * SIZE, dtype, seed).clamp(-limit, limit)
    exact, actual = rows.double(), there_and_back(rows, bits).double()
    step, block = scales(rows, bits), BLOCK[bits]
    largest = exact.abs().view(2, -1, block).amax(-1).repeat_interleave(block, 1)
    rounding = 2 * STAGES * EPSILON * ROTATED * largest
    bound = torch.where(step == 0, TINY, step * (WORST[bits] + 2.0**-20) + rounding)
    assert ((actual - exact).abs() <= bound).all()
    most = ROTATED / LARGEST[bits] * largest * (1 + UP[bits])
    assert (step <= most * (1 + (STAGES + 2) * EPSILON)).all()


@both
def test_the_error_of_gaussian_numbers_is_that_of_even_steps_and_keeps_their_size(bits):
    """Errors spread evenly over a distance d have the variance d^2 / 12; the rotation keeps it."""
    rows = draw(8, 128 * SIZE, seed=3)
    values = there_and_back(rows, bits)
    distance = STEP[bits] * scales(rows, bits)
    expected = (distance**2).mean().item() / 12 / ROTATED  # rotated: 32^0.5 times as large
    assert ((values - rows) ** 2).mean().item() == pytest.approx(expected, rel=0.02)
    gain = (values * rows).sum() / (rows * rows).sum()
    assert abs(gain - 1) < 0.005  # what the project demands of an averaged gradient


def noise(name: str) -> torch.Tensor:
    """(2048, 512) numbers of a distribution; "positive mean": half a deviation above 0."""
    normal = draw(2048, COLUMNS, seed=5)
    uniform = torch.rand(normal.shape, generator=torch.Generator().manual_seed(6)) * 2 - 1
    return {
        "normal": normal,
        "uniform": uniform,
        "Laplace": -uniform.sign() * torch.log1p(-uniform.abs()),
        "positive mean": normal.abs() / 2 + normal / 2,
    }[name]


@pytest.mark.parametrize("name", ["normal", "uniform", "Laplace", "positive mean"])
def test_elements_beside_large_columns_keep_their_size_and_mean(name):
    """Plain INT4 turns two thirds of them into 0: their gain is 0.5 to 0.8.

    The gain of a million elements whose error is a third of their size is known to 0.0003.
    """
    rows, columns = noise(name), torch.arange(COLUMNS)
    large = columns % (COLUMNS // OUTLIERS) == 5
    rows[:, large] *= FACTOR
    flat = rows.view(1, -1)
    values, plain = (there_and_back(flat, bits).view_as(rows) for bits in (ROTATED_4, 4))

    def gain(actual: torch.Tensor, of: torch.Tensor) -> float:
        return ((actual * rows)[:, of].sum() / (rows * rows)[:, of].sum()).item()

    assert gain(values, columns >= 0) == pytest.approx(1, abs=0.005)
    assert gain(values, ~large) == pytest.approx(1, abs=0.02)
    assert gain(plain, ~large) < 0.85
    mean = rows[:, ~large].mean()
    if name == "positive mean":
        assert values[:, ~large].mean() == pytest.approx(mean.item(), rel=0.02)


@pytest.mark.parametrize(("bits", "row"), [(2, 128), (3, 64), (ROTATED_4, 32), (ROTATED_4, 96)])
def test_rows_without_a_gradient_stay_zero(bits, row):
    """With 4 bits also where a block of 128 has parts of several rows."""
    rows = draw(2, 8 * row, seed=5)
    untouched = torch.tensor([1, 2, 4])
    rows.view(2, 8, row)[:, untouched] = 0
    parts = there_and_back(rows, bits).view(2, 8, row)
    assert (parts[:, untouched].view(torch.int32) == 0).all()  # never -0
    assert (parts[:, [0, 3, 5, 6, 7]] != 0).any(-1).all()


@every
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 2.0**127])
def test_a_number_that_is_not_finite_makes_its_block_nan_and_no_other(bits, value):
    """As does one whose multiple by 32 is not: here two of 2^127 add up to infinity."""
    size = BLOCK[bits]
    rows = draw(1, 3 * size, seed=6)
    clean = there_and_back(rows, bits)
    rows[0, size : size + 2] = value
    blocks, before = there_and_back(rows, bits).view(3, size), clean.view(3, size)
    assert blocks[1].isnan().all()
    assert torch.equal(blocks[[0, 2]], before[[0, 2]])


@every
def test_a_block_below_tiny_becomes_zeros(bits):
    size = BLOCK[bits]
    rows = torch.zeros(1, 2 * size)
    rows[0, 3], rows[0, size + 3] = TINY * 0.999, TINY
    blocks = there_and_back(rows, bits).view(2, size)
    assert (blocks[0].view(torch.int32) == 0).all()
    assert blocks[1, 3] > 0


@every
def test_sums_are_rotated_back_once(bits):
    """Equal to fp32's rounding of 4 sums and 5 additions of up to 32 values, each below 7.1 s."""
    rows = draw(4, 2 * SIZE, seed=8)
    layout = layout_of(2 * SIZE, bits)
    packed, total = quantize(rows, layout), torch.empty(2 * SIZE)
    reduce_dequantize(packed, total, layout)
    bound = 9 * EPSILON * 4 * 7.1 * scales_of(packed, *layout.segments).max()
    assert ((total - there_and_back(rows, bits).double().sum(0)).abs() <= 2 * bound).all()


@FEW
@given(dtypes, seeds)
def test_sums_that_stay_rotated_are_packed_as_they_are(dtype, seed):
    """The sum of one row is that row, byte for byte.

    Its largest value is 7 scales s, as |y| of 7 to 7.06 scales gets the code 7. 1/7 in fp32 is
    above 1/7 by less than half of an element's last place, so that 7 s / 7 is s again.
    """
    layout = layout_of(3 * SIZE + ROTATED, ROTATED_4)
    packed = quantize(finite_rows(2, layout.elements, dtype, seed), layout)
    assert torch.equal(reduce_quantize(packed, layout, layout, terms=1), packed)


def test_the_first_of_eight_codes_of_three_bits_is_in_the_lowest_bits():
    """Codes 0 ... 7 stand for -7, -5 ... 7 scales; 64/9 scales are the largest rotated value."""
    values = torch.zeros(1, SIZE)
    values[0, :8] = torch.arange(-7.0, 8.0, 2.0)
    values[0, 8::64] = -64 / 9 * (1 + 2.0**-9)  # so that the scales, truncated, are 1
    rows = rotate(values) / ROTATED
    layout = layout_of(SIZE, 3)
    assert scales(rows, 3).unique().item() == 1
    assert codes(quantize(rows, layout), *layout.segments, 8) == list(range(8))


@FEW
@given(dtypes, seeds)
def test_codes_of_two_bits_are_quotients_rounded_down(dtype, seed):
    """The scale is a fifth of the largest rotated value, and rounded to bf16 as PyTorch does."""
    rows = any_rows(1, 4 * SIZE, dtype, seed)
    blocks = rotate(rows.float()).view(4, SIZE)
    largest = blocks.abs().amax(1, keepdim=True)
    usable = (largest >= TINY) & largest.isfinite()
    expected = (0.2 * largest).bfloat16().double()
    own = scales(rows, 2).view(4, SIZE)[:, :1]
    assert torch.equal(own[usable], expected[usable])
    levels = (blocks.double() / (2 * own)).floor().clamp(-2, 1)
    levels = torch.where(usable, levels, -2).view(-1).int().tolist()
    layout = layout_of(4 * SIZE, 2)
    packed = quantize(rows, layout)
    assert codes(packed, *layout.segments, 4 * SIZE) == [level + 2 for level in levels]


def test_the_first_of_two_codes_of_four_bits_is_in_the_lower_half():
    """Codes -7 ... 7 stand for as many scales; the code of the largest value has its sign."""
    values = torch.zeros(1, SIZE)
    values[0, :15] = torch.arange(-7.0, 8.0)
    rows = unrotated(values)
    layout = layout_of(SIZE, ROTATED_4)
    assert scales(rows, ROTATED_4).unique().item() == 1
    expected = [code & 15 for code in range(-7, 8)] + [0]
    assert codes(quantize(rows, layout), *layout.segments, 16) == expected
    assert codes(quantize(-rows, layout), *layout.segments, 16) == [-code & 15 for code in expected]


@pytest.mark.parametrize(
    ("bits", "largest", "ties", "expected"),
    [  # multiples of two scales are halfway; 4.5 scales to 64/9 become the largest code
        (3, 64.0, (-6, -4, -2, 0, 2, 4, 6), (-4, -2, -2, 0, 0, 2, 2)),
        (ROTATED_4, 7.0, (-6.5, -5.5, -0.5, 0.5, 1.5, 2.5, 6.5), (-6, -6, 0, 0, 2, 2, 6)),
        (2, 5.0, (-3, -2, -1, 0, 1, 2, 3), (-2, -1, -1, 0, 0, 1, 1)),
    ],
)
def test_ties_between_two_codes_go_to_the_even_one_and_of_two_bits_up(
    bits, largest, ties, expected
):
    scale = largest / LARGEST[bits]
    values = torch.zeros(1, SIZE)
    values[0, :7], values[0, 7::64] = torch.tensor(ties) * scale, largest
    rows = unrotated(values)
    layout = layout_of(SIZE, bits)
    packed = quantize(rows, layout)
    assert scales(rows, bits).unique().item() == scale
    first = codes(packed, *layout.segments, 8)[:7]
    assert first == [code + LOWEST[bits] if bits < 4 else code & 15 for code in expected]
    assert torch.equal(packed, reference.quantize(rows, layout, 1))
