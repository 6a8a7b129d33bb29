"""The CUDA kernels of code steps on the CPU, thread block by thread block, against the reference.

tests/zeropp/quant/emulated_cuda/cuda_runtime.h says what the emulation does not show.
"""

from array import array
from types import SimpleNamespace

import pytest
import torch

from tests.zeropp.quant.code_step_checks import (
    RAGGED,
    any_codes,
    check_ragged,
    check_steps,
    check_tiny_blocks,
    many_segments,
    rows_near,
)
from tests.zeropp.quant.emulated_kernels import EmulatedLibrary
from tests.zeropp.quant.packed_bytes import any_rows
from tests.zeropp.quant.reference_checks import UNTOUCHED, with_dirty_gaps
from zeropp.quant import code_step_ops, code_step_reference, reference
from zeropp.quant.code_steps import REACHES, TILE, rows_end, step_layout
from zeropp.quant.cpu import CpuKernels
from zeropp.quant.packing import FLOATS, RAW, RowLayout


@pytest.fixture
def kernels(emulated: EmulatedLibrary) -> CpuKernels:
    return CpuKernels(emulated)


@pytest.mark.parametrize("reach", REACHES)
@pytest.mark.parametrize("seed", range(len(RAGGED)))
def test_ragged_segments(kernels, seed, reach):
    """Shifted rows keep the wide accesses away."""
    dtype, wire = FLOATS[(seed + REACHES.index(reach)) % 3], FLOATS[seed % 3]
    check_ragged(kernels, seed, reach, dtype, wire, shift=seed % 2)


@pytest.mark.parametrize("reach", REACHES)
def test_segments_that_only_wide_accesses_touch(kernels, reach):
    dtype = FLOATS[REACHES.index(reach)]
    rows = RowLayout(sizes=(2 * TILE, 768, 1024 + 16), bits=(8, RAW, 8), wire=dtype)
    held = any_codes(2, rows, reach)
    check_steps(kernels, rows_near(held, rows, dtype, reach), held, step_layout(rows, reach))


@pytest.mark.parametrize("count", [55, 56, 57, 120])
def test_more_segments_than_a_launch_takes(kernels, count):
    layout = step_layout(many_segments(count, FLOATS[count % 3]), REACHES[count % 3])
    held = any_codes(2, layout.rows, count)
    rows = rows_near(held, layout.rows, torch.float32, count)
    check_steps(kernels, rows, held, layout)


def test_gaps_are_neither_read_nor_written(kernels):
    for seed, (sizes, bits) in enumerate(RAGGED):
        rows = RowLayout(sizes=sizes, bits=bits, wire=torch.bfloat16)
        held = with_dirty_gaps(any_codes(2, rows, seed), rows)
        layout = step_layout(rows, REACHES[seed % 3])
        check_steps(kernels, rows_near(held, rows, torch.float32, seed), held, layout)


@pytest.mark.parametrize("sizes", [(), (0, 0)])
def test_a_row_without_elements_has_a_message_of_counts(kernels, sizes):
    layout = step_layout(RowLayout(sizes=sizes, bits=(8,) * len(sizes), wire=torch.bfloat16), 2)
    empty = torch.empty((3, 0), dtype=torch.uint8)
    messages = torch.full((3, layout.num_bytes), UNTOUCHED, dtype=torch.uint8)
    kernels.code_steps(torch.empty((3, 0)), empty, messages, layout.table)
    assert messages.shape == (3, 32) and not messages.any()
    kernels.apply_code_steps(messages, empty, layout.table)


def test_rows_too_small_for_codes(kernels):
    check_tiny_blocks(kernels)


def test_a_copy_catches_up_by_messages(kernels):
    """Scales halve when codes are small enough: it takes a walk of messages to get there."""
    layout = step_layout(RowLayout(sizes=(1000,), bits=(8,), wire=torch.bfloat16), 4)
    held = any_codes(1, layout.rows, 1)
    rows = torch.randn((1, 1000), generator=torch.Generator().manual_seed(1))
    rescaled = 0
    for step in range(90):
        now = rows * (1e-2 if step >= 40 else 1.0)
        before, held = held, check_steps(kernels, now, held, layout)
        scales = layout.rows.segments[0].scales_at, layout.rows.segments[0].data_at
        rescaled += step > 40 and not torch.equal(
            before[:, slice(*scales)], held[:, slice(*scales)]
        )
    assert rescaled >= 2


def test_an_error_has_cudas_message(emulated):
    layout = step_layout(RowLayout(sizes=(8,), bits=(8,), wire=torch.bfloat16), 2)
    numbers = array("q", layout.table)
    table = numbers.buffer_info()[0]
    with pytest.raises(RuntimeError, match="^zpp_code_steps on cuda:99: invalid device ordinal$"):
        emulated.library.zpp_code_steps(table, 0, 0, 0, 0, 1, 99, None)
    with pytest.raises(RuntimeError, match="^zpp_apply_code_steps on cuda:99: invalid device"):
        emulated.library.zpp_apply_code_steps(table, 0, 0, 1, 99, None)


def test_without_kernels_the_reference_runs():
    device = SimpleNamespace(backend=lambda: reference)
    assert code_step_ops._kernels_of(device)() is code_step_reference


def test_messages_of_more_than_two_gibibytes(kernels):
    """The system gives the memory between the two messages when it is written, which it never is.

    cudaMemset2DAsync takes no rows that are 2 GiB apart or more.
    """
    layout = step_layout(RowLayout(sizes=(300,), bits=(8,), wire=torch.bfloat16), 1)
    held = any_codes(2, layout.rows, 1)
    rows = rows_near(held, layout.rows, torch.float32, 1)
    near = torch.empty((2, layout.num_bytes), dtype=torch.uint8)
    kernels.code_steps(rows, held, near, layout.table)
    table, apart = list(layout.table), 2**31 + 64
    table[rows_end(table)] = apart
    far = torch.empty((2, apart), dtype=torch.uint8)
    far[:, :32] = UNTOUCHED
    kernels.code_steps(rows, held, far, table)
    assert torch.equal(far[:, : layout.num_bytes], near)
    moved, expected = held.clone(), held.clone()
    kernels.apply_code_steps(far, moved, table)
    kernels.apply_code_steps(near, expected, layout.table)
    assert torch.equal(moved, expected)


def test_no_memory_outside_is_written(kernels):
    rows = RowLayout(sizes=(TILE + 7, 5, 300), bits=(8, RAW, 8), wire=torch.float16)
    layout = step_layout(rows, 2)
    held = any_codes(2, rows, 3)
    expected = torch.empty((2, layout.num_bytes), dtype=torch.uint8)
    values = any_rows(2, rows.elements, torch.float32, 4)
    code_step_reference.code_steps(values, held, expected, layout.table)
    memory = torch.full((2 * layout.num_bytes + 96,), UNTOUCHED, dtype=torch.uint8)
    start = 48 - memory.data_ptr() % 16
    messages = memory[start : start + expected.numel()].view(2, -1)
    kernels.code_steps(values, held, messages, layout.table)
    after = memory.clone()
    after[start : start + expected.numel()] = UNTOUCHED
    assert (after == UNTOUCHED).all() and (messages != UNTOUCHED).any()
