"""The compiled kernels against the plain-torch reference, byte by byte; running without them."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import zeropp.quant.reference
from benchmarks.kernels.instruction_sets import use_isa
from tests.zeropp.quant.layout_ops import LayoutOps, reference
from tests.zeropp.quant.packed_bytes import (
    FEW,
    RAGGED,
    any_rows,
    dtypes,
    every_16_bit_number,
    fitting_width,
    layouts,
    ragged_layouts,
    scales_of,
    seeds,
    widths,
)
from tests.zeropp.quant.reference_checks import (
    check_requantized,
    check_rows,
    check_sums,
    other_bits,
)
from zeropp.native import kernels as native_kernels
from zeropp.native.kernels import ISAS
from zeropp.quant import cpu
from zeropp.quant.cpu import CpuKernels
from zeropp.quant.ops import dequantize, quantize
from zeropp.quant.packing import FLOATS, ROTATED, ROTATED_4, RowLayout, is_rotated
from zeropp.quant.reference import rotate

THREADS = 3
MANY_BYTES = 3 << 20  # enough for several threads


@pytest.fixture(scope="module")
def kernels() -> Iterator[LayoutOps]:
    backend = cpu.backend()
    if not isinstance(backend, CpuKernels):
        pytest.skip("csrc/ is not built here: make setup builds it where there is a compiler")
    yield LayoutOps(backend)
    use_isa(None)


@pytest.fixture(params=ISAS)
def of_isa(request: pytest.FixtureRequest, kernels: LayoutOps) -> Iterator[LayoutOps]:
    """The kernels of one instruction set."""
    if not use_isa(request.param):
        pytest.skip(f"this processor has no {request.param}")
    yield kernels
    use_isa(None)


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def without_kernels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """No library where it is looked for."""
    monkeypatch.setattr(native_kernels, "FOLDER", tmp_path)
    for cached in (native_kernels.cpu_library, cpu.backend):
        cached.cache_clear()
    yield
    for cached in (native_kernels.cpu_library, cpu.backend):
        cached.cache_clear()


@pytest.mark.parametrize("wire", FLOATS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_rows_of_ragged_segments(of_isa, dtype, wire):
    for seed, layout in enumerate(ragged_layouts(wire)):
        for count, fold in ((1, 1), (6, 1), (6, 2), (6, 3), (4, 4)):
            check_rows(of_isa, any_rows(count, layout.elements, dtype, seed), layout, fold)
        check_requantized(of_isa, any_rows(3, layout.elements, dtype, seed), layout)


@pytest.mark.parametrize("terms", range(1, 10))
def test_sums_of_ragged_segments(of_isa, terms):
    for seed in range(len(RAGGED)):
        layout = ragged_layouts(FLOATS[(seed + terms) % 3])[seed]
        rows = any_rows(2 * terms, layout.elements, torch.float32, seed + 10 * terms)
        packed = reference.quantize(rows, layout, 1)
        check_sums(of_isa, packed, layout, other_bits(layout), terms)


def test_seventeen_terms(of_isa):
    (layout,) = ragged_layouts(torch.float16)[3:4]
    packed = reference.quantize(any_rows(17, layout.elements, torch.bfloat16, 5), layout, 1)
    check_sums(of_isa, packed, layout, other_bits(layout), 17)


@FEW
@given(layouts(), dtypes, seeds, st.data())
def test_any_rows_and_any_sums(kernels, layout, dtype, seed, data):
    fold, terms = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 9))
    bits = tuple(fitting_width(size, data.draw(widths)) for size in layout.sizes)
    onto = RowLayout(sizes=layout.sizes, bits=bits, wire=data.draw(dtypes))
    rows = any_rows(fold * terms, layout.elements, dtype, seed)
    for _ in filter(use_isa, ISAS):
        packed = check_rows(kernels, rows, layout, fold)
        check_sums(kernels, packed, layout, onto, terms)


@pytest.mark.parametrize("dtype", FLOATS)
def test_every_16_bit_number_and_all_its_neighbours_in_fp32(of_isa, dtype):
    """Conversions between types on all bit patterns, and around each tie."""
    rows = every_16_bit_number(dtype)
    for wire in FLOATS:
        layout = RowLayout(sizes=(rows.numel(),), bits=(16,), wire=wire)
        check_rows(of_isa, rows, layout, 1)


@pytest.mark.parametrize("bits", [4, 8])
def test_steps_at_and_beside_every_tie(of_isa, bits):
    """Half to even at every code, of both signs of the scale."""
    top = 1 << (bits - 1)
    ties = torch.arange(-2 * top, 2 * top + 1) / 2
    near = torch.cat((ties, torch.nextafter(ties, ties + 1), torch.nextafter(ties, ties - 1)))
    blocks = [
        torch.cat((torch.tensor([sign * top]), part)) * 2.0**-9
        for part in near.clamp(-top, top).split(100)
        for sign in (-1.0, 1.0)
    ]
    for block in blocks:
        layout = RowLayout(sizes=(len(block),), bits=(bits,), wire=torch.float32)
        check_rows(of_isa, block[None], layout, 1)


@pytest.mark.parametrize(("bits", "largest", "step"), [(3, 64, 9), (ROTATED_4, 7, 0.5)])
def test_rotated_values_at_every_code_and_tie(of_isa, bits, largest, step):
    """Small integers times a number, which the rotation gives exactly; scales are 9, and 1."""
    values = torch.zeros(2, 128)
    steps = torch.arange(-7, 8) * step if bits == 3 else torch.arange(-13, 14) * step
    values[0, : len(steps)], values[1, : len(steps)] = steps, -steps
    values[:, 31::32] = largest
    rows = rotate(values) / ROTATED
    assert torch.equal(rotate(rows), values)
    check_rows(of_isa, rows, RowLayout(sizes=(128,), bits=(bits,), wire=torch.float32), 1)


def test_two_bits_at_and_beside_every_limit(of_isa):
    """A group of one element is rotated to 32 of that size. Scales have 128 fractions."""
    scales = torch.arange(128, 256) / 256
    limits = torch.stack((2 * scales, torch.zeros_like(scales)), 1)
    beside = [torch.nextafter(limits, torch.full_like(limits, end)) for end in (-9.0, 9.0)]
    groups = torch.zeros(len(scales), 8, ROTATED)
    groups[:, 3::4, 0] = 5 * scales[:, None]  # the largest of each block
    groups[:, (0, 1, 2, 4, 5, 6), 0] = torch.cat((limits, *beside), 1)
    rows = groups.view(1, -1)
    layout = RowLayout(sizes=(rows.numel(),), bits=(2,), wire=torch.float32)
    packed = check_rows(of_isa, rows, layout, 1)
    assert torch.equal(scales_of(packed, *layout.segments)[0, ::256], scales.double())


@pytest.mark.parametrize("bits", [2, 3, 4, ROTATED_4, 8, 16])
def test_threads_share_the_work_and_change_nothing(of_isa, threads, bits):
    sizes = (MANY_BYTES // 8 + 77, 33, MANY_BYTES // 8 - 1)
    if is_rotated(bits):
        sizes = (MANY_BYTES // 8 + 64, 33, MANY_BYTES // 8 - 64)
    layout = RowLayout(sizes=sizes, bits=(bits, 16, bits), wire=torch.bfloat16)
    packed = check_rows(of_isa, any_rows(2, layout.elements, torch.float32, bits), layout, 2)
    check_sums(of_isa, packed, layout, other_bits(layout), 2)


def test_threads_with_fewer_tiles_than_threads_and_many_empty_rows(of_isa, threads):
    nothing = RowLayout(sizes=(0, 0), bits=(8, 16), wire=torch.bfloat16)
    assert of_isa.quantize(torch.empty(4, 0), nothing, 2).shape == (4, 0)
    few = RowLayout(sizes=(2048, 5), bits=(8, 4), wire=torch.bfloat16)
    check_rows(of_isa, any_rows(600, few.elements, torch.float32, 3), few, 200)


def test_subnormal_flushing_changes_nothing(of_isa):
    """Scales, reciprocals and products are never subnormal, so GPUs' modes give the same bits."""
    if not torch.set_flush_denormal(False):
        pytest.skip("this processor cannot flush subnormals to zero")
    layout = RowLayout(sizes=(700, 300), bits=(8, 4), wire=torch.float32)
    rows = any_rows(6, layout.elements, torch.float32, 3)
    expected = reference.quantize(rows, layout, 1)
    try:
        torch.set_flush_denormal(True)
        packed = of_isa.quantize(rows, layout, 1)
        sums = of_isa.reduce_quantize(packed, layout, layout, 3)
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(packed, expected)
    assert torch.equal(sums, reference.reduce_quantize(packed, layout, layout, 3))


def test_an_instruction_set_can_be_chosen(kernels):
    assert use_isa("plain") and use_isa(None)
    with pytest.raises(ValueError):
        use_isa("mmx")


def test_without_kernels_all_works_and_the_log_says_so_once(without_kernels, caplog):
    layout = RowLayout(sizes=(300, 5, 129), bits=(8, 16, 4), wire=torch.bfloat16)
    rows = any_rows(4, layout.elements, torch.bfloat16, 1)
    with caplog.at_level(logging.INFO, "zeropp"):
        packed = quantize(rows, layout, fold=2)
        dequantize(packed, torch.empty_like(rows), layout, fold=2)
    assert cpu.backend() is zeropp.quant.reference
    assert torch.equal(packed, reference.quantize(rows, layout, 2))
    assert [record.message for record in caplog.records] == [
        "quantization on the CPU runs in plain PyTorch, which is slow: csrc/ was not built here "
        "(no compiler, or not installed with pip or make setup)"
    ]
