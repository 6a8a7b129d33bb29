"""The compiled kernels against the plain-torch reference, byte by byte.

They are the kernels for CPUs by each instruction set, those for GPUs on the CPU, warp by warp
(tests/zeropp/quant/emulated_cuda/cuda_runtime.h says what that does not show), and on a GPU.
"""

import logging
import os
import random
from array import array
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.kernels.instruction_sets import use_isa
from tests.gpu import MARKS
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
    many_segments,
    other_bits,
    with_dirty_gaps,
)
from zeropp.native import kernels as native_kernels
from zeropp.native.kernels import ISAS
from zeropp.quant import cpu, cuda
from zeropp.quant import reference as quant_reference
from zeropp.quant.cpu import CpuKernels
from zeropp.quant.cuda import CudaKernels
from zeropp.quant.ops import dequantize, quantize
from zeropp.quant.packing import FLOATS, ROTATED, ROTATED_4, RowLayout, is_rotated
from zeropp.quant.reference import rotate

THREADS = 3
CASES = int(os.environ.get("RANDOM_KERNELS", "20"))
MANY_BYTES = 3 << 20  # enough for several threads
WIDTHS = (2, 3, 4, ROTATED_4, 8, 16)
ON_CPU = pytest.mark.parametrize("kernels", ISAS, indirect=True)
ON_GPUS = pytest.mark.parametrize(
    "kernels", ["emulated", pytest.param("cuda", marks=MARKS)], indirect=True
)


@pytest.fixture(params=[*ISAS, "emulated", pytest.param("cuda", marks=MARKS)])
def kernels(request: pytest.FixtureRequest) -> Iterator[LayoutOps]:
    if request.param == "emulated":
        yield request.getfixturevalue("emulated").layout_ops()
        return
    module, kind = (cuda, CudaKernels) if request.param == "cuda" else (cpu, CpuKernels)
    backend = module.backend()
    if not isinstance(backend, kind):
        pytest.skip("csrc/ is not built here: make setup builds it where there is a compiler")
    if kind is CudaKernels:
        yield LayoutOps(backend, "cuda:0")
        return
    if not use_isa(request.param):
        pytest.skip(f"this processor has no {request.param}")
    yield LayoutOps(backend)
    use_isa(None)


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("shift", [0, 3])
@pytest.mark.parametrize("wire", FLOATS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_rows_of_ragged_segments(kernels, dtype, wire, shift):
    """Emulated, a layout is used with one of the types only."""
    folds = ((6, 2), (6, 3)) if kernels.slow else ((1, 1), (6, 1), (6, 2), (6, 3), (4, 4))
    for seed, layout in enumerate(ragged_layouts(wire)):
        if kernels.slow and seed % 3 != (FLOATS.index(wire) + shift) % 3:
            continue
        for count, fold in folds:
            check_rows(kernels, any_rows(count, layout.elements, dtype, seed), layout, fold, shift)
        check_requantized(kernels, any_rows(3, layout.elements, dtype, seed), layout, shift)


@pytest.mark.parametrize("terms", [*range(1, 10), 17])
def test_sums_of_ragged_segments(kernels, terms):
    for seed in range(len(RAGGED) if terms < 10 or not kernels.slow else 1):
        layout = ragged_layouts(FLOATS[(seed + terms) % 3])[seed]
        rows = any_rows(2 * terms, layout.elements, torch.float32, seed + 10 * terms)
        packed = reference.quantize(rows, layout, 1)
        check_sums(kernels, packed, layout, other_bits(layout), terms, terms % 2)
        if terms < 4:
            for onto in (layout, other_bits(other_bits(layout))):
                check_sums(kernels, packed, layout, onto, terms, terms % 2)


def test_random_cases_of_the_emulated_kernels(emulated):
    """One width, which has a kernel, or several; odd sizes, or those that can be rotated."""
    kernels = emulated.layout_ops()
    for seed in range(CASES):
        draw = random.Random(seed)
        whole = draw.choice((1, 32, 64))
        sizes = [whole * draw.randint(0, 1500 // whole) for _ in range(draw.randint(1, 3))]

        def layout() -> RowLayout:
            chosen = draw.sample(WIDTHS, draw.choice((1, 1, 3)))  # noqa: B023
            bits = (fitting_width(size, draw.choice(chosen)) for size in sizes)  # noqa: B023
            return RowLayout(sizes=tuple(sizes), bits=tuple(bits), wire=draw.choice(FLOATS))  # noqa: B023

        first, onto, terms, shift = layout(), layout(), draw.randint(1, 9), draw.choice((0, 0, 3))
        rows = any_rows(terms, first.elements, draw.choice(FLOATS), seed)
        check_sums(kernels, check_rows(kernels, rows, first, 1, shift), first, onto, terms, shift)
        if seed % 5 == 0:
            check_requantized(kernels, rows, first, shift)


@FEW
@given(layouts(), dtypes, seeds, st.data())
def test_any_rows_and_any_sums(layout, dtype, seed, data):
    backend = cpu.backend()
    fold, terms = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 9))
    bits = tuple(fitting_width(size, data.draw(widths)) for size in layout.sizes)
    onto = RowLayout(sizes=layout.sizes, bits=bits, wire=data.draw(dtypes))
    rows = any_rows(fold * terms, layout.elements, dtype, seed)
    for _ in filter(use_isa, ISAS if isinstance(backend, CpuKernels) else ()):
        packed = check_rows(LayoutOps(backend), rows, layout, fold)
        check_sums(LayoutOps(backend), packed, layout, onto, terms)
    use_isa(None)


@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_segments_that_only_wide_accesses_touch(kernels, dtype, bits):
    last = 2048 + 64 if kernels.device == "cpu" else 1 << 20
    layout = RowLayout(sizes=(3072, 768, last), bits=(bits,) * 3, wire=dtype)
    packed = check_rows(kernels, any_rows(4, layout.elements, dtype, bits), layout, 2)
    for onto_bits in WIDTHS:
        onto = RowLayout(sizes=layout.sizes, bits=(onto_bits,) * 3, wire=dtype)
        check_sums(kernels, packed, layout, onto, 4)


@ON_GPUS
@pytest.mark.parametrize("count", [55, 56, 57, 120])
def test_more_segments_than_a_launch_takes(kernels, count):
    layout = many_segments(count, FLOATS[count % 3])
    rows = any_rows(2, layout.elements, torch.float32, count)
    packed = check_rows(kernels, rows, layout)
    check_requantized(kernels, rows, layout)
    check_sums(kernels, packed, layout, other_bits(layout), 2)


@ON_GPUS
@pytest.mark.parametrize("folds", [1, 2, 6, 12])
def test_more_rows_than_a_grid_takes(kernels, folds):
    """The emulation's grids have 5 blocks in y and z, a GPU's 65535."""
    count = 12 if kernels.slow else 72_000
    fold = count * folds // 12
    layout = RowLayout(sizes=(300, 5) if kernels.slow else (5, 3), bits=(8, 16), wire=FLOATS[1])
    packed = check_rows(kernels, any_rows(count, layout.elements, FLOATS[0], fold), layout, fold)
    check_sums(kernels, packed, layout, other_bits(layout), count // fold)


def test_gaps_are_not_read(kernels):
    for seed, layout in enumerate(ragged_layouts(torch.bfloat16)):
        clean = reference.quantize(any_rows(4, layout.elements, torch.float32, seed), layout, 1)
        packed = with_dirty_gaps(clean, layout)
        check_sums(kernels, packed, layout, other_bits(layout), 2)


@pytest.mark.parametrize("dtype", FLOATS)
def test_every_16_bit_number_and_all_its_neighbours_in_fp32(kernels, dtype):
    """Conversions between types on all bit patterns, and around each tie."""
    if kernels.slow:
        return
    rows = every_16_bit_number(dtype)
    for wire in FLOATS:
        check_rows(kernels, rows, RowLayout(sizes=(rows.numel(),), bits=(16,), wire=wire))
    for bits in (4, 8):
        layout = RowLayout(sizes=(rows.numel(),), bits=(bits,), wire=torch.float32)
        packed = check_rows(kernels, rows, layout)
        check_sums(kernels, packed, layout, other_bits(layout), 1)


@pytest.mark.parametrize("bits", [4, 8])
def test_steps_at_and_beside_every_tie(kernels, bits):
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
        check_rows(kernels, block[None], layout)


@pytest.mark.parametrize("bits", [4, 8])
def test_reciprocals_and_products_round_alike_for_scales_of_all_sizes(kernels, bits):
    """A block for each exponent and each of the 128 bf16 fractions, then ties at every code."""
    top = 1 << (bits - 1)
    scales = torch.arange(128 << 7, 254 << 7, dtype=torch.int32).mul(1 << 16).view(torch.float32)
    scales = torch.cat((scales, 1 / scales))[:: 97 if kernels.device == "cpu" else 1]
    steps = torch.arange(-2 * top, 2 * top + 1) / 2
    block = {8: 256, 4: 128}[bits]
    for part in steps.split(block - 1):
        part = torch.nn.functional.pad(part.clamp(-top, top), (1, block - 1 - len(part)), value=top)
        rows = (scales[:, None] * part * 2.0**-20).reshape(1, -1)
        layout = RowLayout(sizes=(rows.numel(),), bits=(bits,), wire=torch.float32)
        check_rows(kernels, rows, layout)


@pytest.mark.parametrize(("bits", "largest", "step"), [(3, 64, 9), (ROTATED_4, 7, 0.5)])
def test_rotated_values_at_every_code_and_tie(kernels, bits, largest, step):
    """Small integers times a number, which the rotation gives exactly; scales are 9, and 1."""
    values = torch.zeros(2, 128)
    steps = torch.arange(-7, 8) * step if bits == 3 else torch.arange(-13, 14) * step
    values[0, : len(steps)], values[1, : len(steps)] = steps, -steps
    values[:, 31::32] = largest
    rows = rotate(values) / ROTATED
    assert torch.equal(rotate(rows), values)
    check_rows(kernels, rows, RowLayout(sizes=(128,), bits=(bits,), wire=torch.float32))


def test_two_bits_at_and_beside_every_limit(kernels):
    """A group of one element is rotated to 32 of that size. Scales have 128 fractions."""
    scales = torch.arange(128, 256) / 256
    limits = torch.stack((2 * scales, torch.zeros_like(scales)), 1)
    beside = [torch.nextafter(limits, torch.full_like(limits, end)) for end in (-9.0, 9.0)]
    groups = torch.zeros(len(scales), 8, ROTATED)
    groups[:, 3::4, 0] = 5 * scales[:, None]  # the largest of each block
    groups[:, (0, 1, 2, 4, 5, 6), 0] = torch.cat((limits, *beside), 1)
    rows = groups.view(1, -1)
    layout = RowLayout(sizes=(rows.numel(),), bits=(2,), wire=torch.float32)
    packed = check_rows(kernels, rows, layout)
    assert torch.equal(scales_of(packed, *layout.segments)[0, ::256], scales.double())


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 2.0**-95])
@pytest.mark.parametrize("dtype", FLOATS)
def test_blocks_without_a_scale(kernels, dtype, value):
    layout = RowLayout(sizes=(600, 600), bits=(8, 4), wire=dtype)
    in_one_place, everywhere = (any_rows(2, 1200, dtype, 2).nan_to_num() for _ in range(2))
    in_one_place[:, 257] = value
    everywhere[:] = value
    for rows in (in_one_place, everywhere):
        packed = check_rows(kernels, rows, layout)
        check_sums(kernels, packed, layout, other_bits(layout), 2)


@ON_CPU
@pytest.mark.parametrize("bits", WIDTHS)
def test_threads_share_the_work_and_change_nothing(kernels, threads, bits):
    sizes = (MANY_BYTES // 8 + 77, 33, MANY_BYTES // 8 - 1)
    if is_rotated(bits):
        sizes = (MANY_BYTES // 8 + 64, 33, MANY_BYTES // 8 - 64)
    layout = RowLayout(sizes=sizes, bits=(bits, 16, bits), wire=torch.bfloat16)
    packed = check_rows(kernels, any_rows(2, layout.elements, torch.float32, bits), layout, 2)
    check_sums(kernels, packed, layout, other_bits(layout), 2)


@ON_CPU
def test_threads_with_fewer_tiles_than_threads_and_many_empty_rows(kernels, threads):
    nothing = RowLayout(sizes=(0, 0), bits=(8, 16), wire=torch.bfloat16)
    assert kernels.quantize(torch.empty(4, 0), nothing, 2).shape == (4, 0)
    few = RowLayout(sizes=(2048, 5), bits=(8, 4), wire=torch.bfloat16)
    check_rows(kernels, any_rows(600, few.elements, torch.float32, 3), few, 200)


@ON_CPU
def test_subnormal_flushing_changes_nothing(kernels):
    """Scales, reciprocals and products are never subnormal, so GPUs' modes give the same bits."""
    if not torch.set_flush_denormal(False):
        pytest.skip("this processor cannot flush subnormals to zero")
    layout = RowLayout(sizes=(700, 300), bits=(8, 4), wire=torch.float32)
    rows = any_rows(6, layout.elements, torch.float32, 3)
    expected = reference.quantize(rows, layout, 1)
    try:
        torch.set_flush_denormal(True)
        packed = kernels.quantize(rows, layout, 1)
        sums = kernels.reduce_quantize(packed, layout, layout, 3)
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(packed, expected)
    assert torch.equal(sums, reference.reduce_quantize(packed, layout, layout, 3))


def test_an_instruction_set_can_be_chosen():
    assert use_isa("plain") and use_isa(None)
    with pytest.raises(ValueError):
        use_isa("mmx")


@ON_GPUS
def test_an_error_has_cudas_message(kernels):
    library = kernels.backend.library.library if kernels.slow else kernels.backend.library
    assert library.library.zpp_ready(0) == 0 != library.library.zpp_ready(99)
    layout = array("q", RowLayout(sizes=(8,), bits=(8,), wire=torch.bfloat16).table)
    with pytest.raises(RuntimeError, match="^zpp_quantize on cuda:99: invalid device ordinal"):
        library.zpp_quantize(layout.buffer_info()[0], 0, 0, 0, 1, 1, 99, None)


@pytest.mark.parametrize(
    ("module", "library", "said"),
    [
        (cpu, native_kernels.cpu_library, "on the CPU runs in plain PyTorch, which is slow: csrc/"),
        (cuda, native_kernels.cuda_library, "on GPUs runs in plain PyTorch, not in CUDA kernels"),
    ],
)
def test_without_a_library_the_reference_runs_and_the_log_says_so_once(
    module, library, said, monkeypatch, tmp_path, caplog
):
    monkeypatch.setattr(native_kernels, "FOLDER", tmp_path)
    for cached in (library, module.backend):
        cached.cache_clear()
    layout = RowLayout(sizes=(300, 5, 129), bits=(8, 16, 4), wire=torch.bfloat16)
    rows = any_rows(4, layout.elements, torch.bfloat16, 1)
    try:
        with caplog.at_level(logging.INFO, "zeropp"):
            assert module.backend() is module.backend() is quant_reference
            packed = quantize(rows, layout, fold=2)
            dequantize(packed, torch.empty_like(rows), layout, fold=2)
    finally:
        for cached in (library, module.backend):
            cached.cache_clear()
    assert torch.equal(packed, reference.quantize(rows, layout, 2))
    (line,) = [line for line in caplog.messages if line.startswith(f"quantization {said}")]
    assert "built here" in line


@pytest.mark.parametrize("offset", [2, 8])
def test_packed_rows_must_be_aligned(offset):
    memory = torch.zeros(64, dtype=torch.uint8)
    start = -memory.data_ptr() % 16
    assert cuda.aligned_address(memory[start:]) % 16 == 0
    with pytest.raises(ValueError, match=f"begins {offset} bytes after a multiple of 16"):
        cuda.aligned_address(memory[start + offset :])
