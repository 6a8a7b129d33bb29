"""Messages that move INT8 codes: what arrives, how fast it catches up, and what it costs."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from benchmarks.kernels.instruction_sets import use_isa
from zeropp.native.kernels import ISAS
from zeropp.quant import code_step_reference as reference
from zeropp.quant.code_step_ops import apply_code_steps, code_steps
from zeropp.quant.code_step_reference import _packed_steps, _unpacked_steps, read_counts
from zeropp.quant.code_steps import RESCALED, TILE, StepLayout, step_bytes, step_layout
from zeropp.quant.ops import dequantize, quantize
from zeropp.quant.packing import BLOCK, FLOATS, RAW, RowLayout, num_blocks, row_layout

SIZES = (3000, 7, 256, 0, 5000, 1)
WIDTHS = (8, RAW, 8, 8, 8, 8)
# Around the vectors of all instruction sets, blocks, and tiles.
RAGGED = (1, 7, 31, 32, 33, 63, 64, 65, 255, 256, 257, TILE - 1, TILE, TILE + 1, 2 * TILE + 700)
KINDS = (
    "stays", "moves", "ties", "far", "shrinks", "is small", "grows", "vanishes", "has no scale",
    "had NaN", "breaks",
)  # fmt: skip
SMALL_CODES = ("shrinks", "is small")


def row_of(sizes: tuple[int, ...], seed: int = 0, scale: float = 0.02) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn((1, sum(sizes)), generator=generator) * scale


def numbers(packed: Tensor, layout) -> Tensor:
    row = torch.empty((len(packed), layout.elements))
    dequantize(packed, row, layout)
    return row


def advance(row: Tensor, packed: Tensor, layout: StepLayout) -> Tensor:
    message = code_steps(row, packed, layout)
    apply_code_steps(message, packed, layout)
    return read_counts(message)[0]


@pytest.mark.parametrize("reach", [1, 2, 4])
@pytest.mark.parametrize("size", [1, 4, 5, 23, 24, 25, 255, TILE - 1, TILE, TILE + 1, 3 * TILE])
def test_steps_survive_packing(size: int, reach: int) -> None:
    generator = torch.Generator().manual_seed(size)
    steps = torch.randint(-reach, reach + 1, (2, size), generator=generator).float()
    packed = _packed_steps(steps, reach)
    assert packed.shape == (2, step_bytes(size, reach))
    assert torch.equal(_unpacked_steps(packed, size, reach), steps)


@pytest.mark.parametrize(("reach", "bits"), [(1, 1.6), (2, 7 / 3), (4, 3.2)])
def test_bytes_of_a_message(reach: int, bits: float) -> None:
    size = 1 << 20
    message = step_layout(row_layout((size,), (8,), torch.bfloat16), reach)
    assert message.num_bytes * 8 / size == pytest.approx(bits + 16 / BLOCK[8], rel=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("reach", [1, 2, 4])
def test_both_sides_stay_equal_and_catch_up(reach: int, dtype: torch.dtype) -> None:
    layout = row_layout(SIZES, WIDTHS, dtype)
    message = step_layout(layout, reach)
    row = row_of(SIZES).to(dtype)
    ours = quantize(row, layout)
    theirs = ours.clone()
    for step in range(12):
        row = (row.float() + row_of(SIZES, seed=step + 1, scale=2e-4)).to(dtype)
        sent = code_steps(row, ours, message)
        for copy in (ours, theirs):
            apply_code_steps(sent, copy, message)
        assert torch.equal(ours, theirs)
    for _ in range(40):
        last = advance(row, ours, message)
    assert last.tolist() == [0] * len(last)  # nothing is left to send
    scales = numbers_of_scales(ours, layout, row)
    require_nearest(numbers(ours, layout), row.float(), scales)


def numbers_of_scales(packed: Tensor, layout, row: Tensor) -> Tensor:
    """The distance between codes at each element; of raw ones, what their type cannot hold."""
    steps = torch.zeros_like(row, dtype=torch.float32)
    for segment in layout.segments:
        if segment.bits == RAW:
            continue
        blocks = -(-segment.size // BLOCK[8])
        scales = packed[:, segment.scales_at : segment.scales_at + 2 * blocks]
        scales = scales.contiguous().view(torch.bfloat16).float().abs().repeat_interleave(256, 1)
        steps[:, segment.start : segment.start + segment.size] = scales[:, : segment.size]
    return steps


def require_nearest(numbers: Tensor, row: Tensor, steps: Tensor) -> None:
    """Half a step of error, or two for the largest and smallest codes (docs/numerics.md)."""
    allowed = torch.where(numbers.abs() >= 127 * steps, 2.0, 0.5 * (1 + 1e-5))
    assert ((numbers - row).abs() <= allowed * steps).all()


def test_small_updates_cost_no_more_than_whole_codes() -> None:
    layout = row_layout((4096,), (8,), torch.float32)
    message = step_layout(layout, 2)
    row = row_of((4096,))
    packed = quantize(row, layout)
    for step in range(100):
        row = row + row_of((4096,), seed=step + 1, scale=1e-4)
        counts = advance(row, packed, message)
        assert counts[3] == 0  # none is capped
    error = (numbers(packed, layout) - row).norm() / row.norm()
    whole = (numbers(quantize(row, layout), layout) - row).norm() / row.norm()
    assert error < 2.5 * whole  # a scale may be up to 1.25 / 0.45 of the smallest


def test_a_block_that_grows_or_shrinks_gets_another_scale() -> None:
    layout = row_layout((512,), (8,), torch.float32)
    message = step_layout(layout, 4)
    row = row_of((512,))
    packed = quantize(row, layout)
    for factor in (10.0, 1e-3):
        row = row * factor
        rescaled = 0
        for _ in range(300):
            rescaled += int(advance(row, packed, message)[RESCALED])
        assert rescaled >= 2
        assert (numbers(packed, layout) - row).norm() / row.norm() < 0.015


def test_zeros_start_to_move_and_numbers_become_zeros() -> None:
    layout = row_layout((300,), (8,), torch.float32)
    message = step_layout(layout, 2)
    packed = quantize(torch.zeros((1, 300)), layout)
    assert advance(torch.zeros((1, 300)), packed, message).sum() == 0
    row = row_of((300,), scale=1e-3)
    allowed = row.abs().max() / 4  # half a step of -2 ... 2
    for _ in range(6):
        advance(row, packed, message)
        assert (numbers(packed, layout) - row).abs().max() <= allowed * (1 + 2**-7)
        allowed /= 2
    for _ in range(200):
        advance(torch.zeros((1, 300)), packed, message)
    assert not packed.any()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_makes_its_block_nan_until_it_is(bad: float) -> None:
    layout = row_layout((600,), (8,), torch.float32)
    message = step_layout(layout, 2)
    row = row_of((600,))
    packed = quantize(row, layout)
    broken = row.clone()
    broken[0, 300] = bad
    advance(broken, packed, message)
    result = numbers(packed, layout)[0]
    assert result[256:512].isnan().all()
    assert result[:256].isfinite().all() and result[512:].isfinite().all()
    for _ in range(12):
        advance(row, packed, message)
    assert (numbers(packed, layout) - row).norm() / row.norm() < 0.015


@pytest.mark.parametrize("seed", range(6))
def test_random_walks_of_random_rows(seed: int) -> None:
    """Both sides equal after any sequence of rows, and the rest of an error halves in time."""
    generator = torch.Generator().manual_seed(seed)
    sizes = tuple(torch.randint(0, 900, (4,), generator=generator).tolist())
    widths = tuple(8 if torch.rand((), generator=generator) < 0.7 else RAW for _ in sizes)
    layout = row_layout(sizes, widths, torch.float32)
    row = row_of(sizes, seed)
    ours = quantize(row, layout)
    theirs = ours.clone()
    for _ in range(10):
        reach = (1, 2, 4)[torch.randint(0, 3, (), generator=generator)]
        factor = 10.0 ** torch.randint(-3, 3, (), generator=generator)
        keeps = torch.rand((1, sum(sizes)), generator=generator) < 0.5
        row = torch.where(keeps, row, row_of(sizes, seed + 1) * factor)
        message = step_layout(layout, reach)
        sent = code_steps(row, ours, message)
        for copy in (ours, theirs):
            apply_code_steps(sent, copy, message)
        assert torch.equal(ours, theirs)
    for _ in range(150):
        advance(row, ours, step_layout(layout, 4))
    steps = numbers_of_scales(ours, layout, row)
    require_nearest(numbers(ours, layout), row, steps)


def test_bad_arguments_are_named() -> None:
    layout = row_layout((300,), (8,), torch.float32)
    with pytest.raises(ValueError, match="reach 3: expected one of 1, 2, 4"):
        StepLayout(rows=layout, reach=3)
    with pytest.raises(ValueError, match="codes with 8 bits have steps"):
        StepLayout(rows=row_layout((300,), (4,), torch.float32), reach=2)
    message, packed = step_layout(layout, 2), quantize(torch.zeros((1, 300)), layout)
    with pytest.raises(ValueError, match=r"rows has shape \(1, 299\)"):
        code_steps(torch.zeros((1, 299)), packed, message)
    with pytest.raises(TypeError, match="rows is torch.float64"):
        code_steps(torch.zeros((1, 300), dtype=torch.float64), packed, message)
    with pytest.raises(ValueError, match="packed is on meta, other arguments on cpu"):
        code_steps(torch.zeros((1, 300)), packed.to("meta"), message)
    with pytest.raises(ValueError, match="messages has shape"):
        apply_code_steps(packed, packed, message)


@pytest.fixture
def isas() -> Iterator[list[str]]:
    """The instruction sets that this processor has and there are kernels for."""
    yield [isa for isa in ISAS if use_isa(isa)]
    use_isa(None)


@pytest.mark.parametrize("reach", [1, 2, 4])
@pytest.mark.parametrize("seed", range(12))
def test_kernels_give_the_bits_of_the_reference(isas, seed: int, reach: int) -> None:
    """Random layouts and rows that grow, shrink, vanish and break, through some messages."""
    generator = torch.Generator().manual_seed(seed)
    sizes = tuple(torch.randint(0, 9000, (4,), generator=generator).tolist())
    widths = tuple(8 if torch.rand((), generator=generator) < 0.7 else RAW for _ in sizes)
    dtype = (torch.float32, torch.bfloat16, torch.float16)[seed % 3]
    layout = row_layout(sizes, widths, dtype)
    message = step_layout(layout, reach)
    base = row_of(sizes, seed)
    held = quantize(base.to(dtype), layout).repeat(2, 1)
    for step in range(6):
        factor = 10.0 ** torch.randint(-3, 2, (), generator=generator)
        base = base + torch.randn(base.shape, generator=generator) * 1e-3
        row = torch.stack((base[0], base[0] * factor)).to(dtype)
        if step == 3 and sum(sizes):
            row[0, :700] = 0.0
            row[1, len(row[1]) // 2] = (float("nan"), float("inf"))[seed % 2]
        require_reference_bits(isas, row, held, message)


def require_reference_bits(
    isas: list[str], row: Tensor, packed: Tensor, message: StepLayout
) -> None:
    """All kernels and the reference write the same message, and move `packed` to the same codes."""
    expected = packed.clone()
    sent_by_reference = torch.empty((len(row), message.num_bytes), dtype=torch.uint8)
    reference.code_steps(row, packed, sent_by_reference, message.table)
    reference.apply_code_steps(sent_by_reference, expected, message.table)
    for isa in isas:
        use_isa(isa)
        sent, moved = code_steps(row, packed, message), packed.clone()
        assert torch.equal(sent, sent_by_reference), isa
        apply_code_steps(sent, moved, message)
        assert torch.equal(moved, expected), isa
    packed.copy_(expected)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("reach", [1, 2, 4])
def test_kernels_give_the_bits_of_the_reference_in_all_kinds_of_blocks(
    isas, reach: int, dtype: torch.dtype
) -> None:
    layout = row_layout(RAGGED, (8,) * len(RAGGED), dtype)
    for seed in range(3):
        row, packed = blocks_of_all_kinds(layout, seed)
        for _ in range(3):
            require_reference_bits(isas, row.to(dtype), packed, step_layout(layout, reach))


def blocks_of_all_kinds(layout: RowLayout, seed: int) -> tuple[Tensor, Tensor]:
    """A row, and what is held of it, whose blocks each need another branch of the kernels."""
    generator = torch.Generator().manual_seed(seed)
    row = torch.zeros((1, layout.elements))
    packed = torch.zeros((1, layout.packed_bytes), dtype=torch.uint8)
    for segment in layout.segments:
        codes = packed[0, segment.data_at : segment.data_at + segment.size].view(torch.int8)
        stop = segment.scales_at + 2 * num_blocks(segment.size, 8)
        scales = packed[0, segment.scales_at : stop].view(torch.bfloat16)
        values = row[0, segment.start : segment.start + segment.size]
        for block, (part, into) in enumerate(zip(values.split(256), codes.split(256), strict=True)):
            kind = KINDS[torch.randint(len(KINDS), (), generator=generator)]
            scale = 2.0 ** torch.randint(-12, -6, (), generator=generator)
            scales[block] = scale * torch.randint(0, 2, (), generator=generator).mul(2).sub(1)
            fill_block(kind, part, into, scales[block : block + 1], generator)
    return row, packed


def fill_block(
    kind: str, values: Tensor, codes: Tensor, scale: Tensor, generator: torch.Generator
) -> None:
    """Codes of a block and, in steps of its scale, values beside them."""
    size = codes.shape

    def integers(lowest: int, highest: int) -> Tensor:
        return torch.randint(lowest, highest + 1, size, generator=generator).float()

    codes.copy_(integers(-57, 57) if kind in SMALL_CODES else integers(-128, 127))
    steps = {
        "stays": lambda: codes + torch.randn(size, generator=generator) * 0.4,
        "moves": lambda: codes + integers(-7, 7),
        "ties": lambda: integers(-129, 128) + 0.5,
        "far": lambda: integers(-129, 129),
        "shrinks": lambda: codes + integers(-3, 3) / 8,
        "is small": lambda: integers(-57, 57),
        "grows": lambda: codes * 3.3,
        "vanishes": lambda: integers(0, 0),
        "has no scale": lambda: codes,
        "had NaN": lambda: codes,
        "breaks": lambda: codes,
    }[kind]()
    values.copy_(steps * scale.float())
    if kind in ("has no scale", "had NaN"):
        scale.fill_(0.0 if kind == "has no scale" else float("nan"))
        codes.zero_()
    if kind == "breaks":
        at = torch.randint(len(values), (), generator=generator)
        values[at] = (float("nan"), float("inf"), -float("inf"))[at % 3]
