"""The CUDA kernels of code steps on a GPU: the reference's bytes, on any stream and in a graph."""

import pytest
import torch

from tests.gpu import MARKS
from tests.zeropp.quant.code_step_checks import (
    RAGGED,
    any_codes,
    check_ragged,
    check_steps,
    check_tiny_blocks,
    many_segments,
    message_bytes,
    rows_near,
)
from tests.zeropp.quant.packed_bytes import any_rows
from tests.zeropp.quant.reference_checks import UNTOUCHED, with_dirty_gaps
from zeropp.quant import code_step_reference as reference
from zeropp.quant import cuda
from zeropp.quant.code_step_ops import apply_code_steps, code_steps
from zeropp.quant.code_steps import REACHES, TILE, step_layout
from zeropp.quant.cuda import CudaKernels
from zeropp.quant.packing import FLOATS, RAW, RowLayout

GPU = "cuda:0"
CYCLES = 200_000_000  # a tenth of a second: far longer than a launch
ROWS = 70_000  # more than a grid has in y
pytestmark = MARKS


@pytest.fixture(scope="module")
def kernels() -> CudaKernels:
    backend = cuda.backend()
    if not isinstance(backend, CudaKernels):
        pytest.skip("csrc/ is not built for this GPU: install again where nvcc is")
    return backend


@pytest.mark.parametrize("shift", [0, 1, 3])
@pytest.mark.parametrize("wire", FLOATS)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("reach", REACHES)
def test_ragged_segments(kernels, reach, dtype, wire, shift):
    for seed in range(2 * len(RAGGED)):
        check_ragged(kernels, seed, reach, dtype, wire, GPU, shift)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("reach", REACHES)
def test_segments_that_only_wide_accesses_touch(kernels, reach, dtype):
    rows = RowLayout(sizes=(100 * TILE, 768, 1 << 20), bits=(8, RAW, 8), wire=dtype)
    held = any_codes(4, rows, reach)
    for seed in range(3):
        near = rows_near(held, rows, dtype, seed)
        held = check_steps(kernels, near, held, step_layout(rows, reach), GPU)


@pytest.mark.parametrize("count", [56, 57, 300])
def test_more_segments_than_a_launch_takes(kernels, count):
    layout = step_layout(many_segments(count, FLOATS[count % 3]), REACHES[count % 3])
    held = any_codes(2, layout.rows, count)
    check_steps(kernels, rows_near(held, layout.rows, torch.float32, count), held, layout, GPU)


def test_more_rows_than_a_grid_has(kernels):
    layout = step_layout(RowLayout(sizes=(5, 3), bits=(8, RAW), wire=torch.float16), 2)
    held = any_codes(ROWS, layout.rows, 1)
    check_steps(kernels, rows_near(held, layout.rows, torch.float32, 2), held, layout, GPU)


def test_gaps_are_neither_read_nor_written(kernels):
    for seed, (sizes, bits) in enumerate(RAGGED):
        rows = RowLayout(sizes=sizes, bits=bits, wire=torch.bfloat16)
        held = with_dirty_gaps(any_codes(2, rows, seed), rows)
        layout = step_layout(rows, REACHES[seed % 3])
        check_steps(kernels, rows_near(held, rows, torch.float32, seed), held, layout, GPU)


@pytest.mark.parametrize("reach", REACHES)
def test_ratios_and_products_round_alike_for_scales_of_all_sizes(kernels, reach):
    """A block for each exponent and each bf16 fraction, towards rows of another size."""
    scales = torch.arange(34 << 7, 220 << 7, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    blocks = len(scales)
    rows = RowLayout(sizes=(256 * blocks,), bits=(8,), wire=torch.float32)
    (segment,) = rows.segments
    held = torch.zeros((1, rows.packed_bytes), dtype=torch.uint8)
    held[0, : 2 * blocks] = scales.view(torch.uint8)
    codes = torch.arange(-128, 128, dtype=torch.int8).view(torch.uint8)
    held[0, segment.data_at :] = codes.repeat(blocks)
    for factor in (1.0, 0.45, 3.0):
        ties = scales.float()[:, None] * (torch.arange(-256, 256, 2) / 2 + 0.5) * factor
        held = check_steps(kernels, ties.view(1, -1), held, step_layout(rows, reach), GPU)


def test_rows_too_small_for_codes(kernels):
    check_tiny_blocks(kernels, GPU)


def test_the_ops_use_the_kernels(kernels):
    rows = RowLayout(sizes=(5000, 5, 129), bits=(8, RAW, 8), wire=torch.bfloat16)
    layout = step_layout(rows, 2)
    held = any_codes(2, rows, 1)
    near = rows_near(held, rows, torch.bfloat16, 2)
    packed = held.to(GPU)
    messages = code_steps(near.to(GPU), packed, layout)
    right = code_steps(near, held, layout)
    assert torch.equal(message_bytes(messages.cpu(), layout), message_bytes(right, layout))
    apply_code_steps(right.to(GPU), packed, layout)
    apply_code_steps(right, held, layout)
    assert torch.equal(packed.cpu(), held)
    nothing = code_steps(near[:0].to(GPU), packed[:0], layout)
    assert nothing.shape == (0, layout.num_bytes)
    apply_code_steps(nothing, packed[:0], layout)


def test_they_run_on_the_current_stream_and_wait_for_nothing(kernels):
    """The rows are written behind a long wait: elsewhere, a kernel would read what was there."""
    rows = RowLayout(sizes=(1 << 16, 77), bits=(8, 8), wire=torch.bfloat16)
    layout = step_layout(rows, 4)
    held = any_codes(2, rows, 1)
    near = rows_near(held, rows, torch.float32, 2)
    late, now, packed = near.pin_memory(), torch.zeros_like(near, device=GPU), held.to(GPU)
    messages = torch.full((2, layout.num_bytes), UNTOUCHED, dtype=torch.uint8, device=GPU)
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(CYCLES)
        now.copy_(late, non_blocking=True)
        kernels.code_steps(now, packed, messages, layout.table)
        kernels.apply_code_steps(messages, packed, layout.table)
        finished = side.record_event()
    assert not finished.query()
    side.synchronize()
    expected = torch.empty((2, layout.num_bytes), dtype=torch.uint8)
    reference.code_steps(near, held, expected, layout.table)
    reference.apply_code_steps(expected, held, layout.table)
    assert torch.equal(messages.cpu(), expected) and torch.equal(packed.cpu(), held)


def test_a_graph_holds_both_and_replays_them_on_new_numbers(kernels):
    """Counts begin at 0 in each replay."""
    rows = RowLayout(sizes=(TILE + 100, 77, 300), bits=(8, RAW, 8), wire=torch.float32)
    layout = step_layout(rows, 2)
    held = any_codes(3, rows, 1)
    packed, values = held.to(GPU), torch.zeros((3, rows.elements), device=GPU)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        messages = code_steps(values, packed, layout)
        apply_code_steps(messages, packed, layout)
    for seed in (1, 2, 3):
        near = rows_near(held, rows, torch.float32, seed).nan_to_num()
        values.copy_(near)
        graph.replay()
        expected = torch.empty((3, layout.num_bytes), dtype=torch.uint8)
        reference.code_steps(near, held, expected, layout.table)
        reference.apply_code_steps(expected, held, layout.table)
        assert torch.equal(messages.cpu(), expected) and torch.equal(packed.cpu(), held)


def test_the_same_bytes_every_time(kernels):
    rows = RowLayout(sizes=(1 << 20, 333), bits=(8, 8), wire=torch.bfloat16)
    layout = step_layout(rows, 1)
    packed, values = any_codes(4, rows, 1).to(GPU), any_rows(4, rows.elements, torch.float32, 2)
    first = code_steps(values.to(GPU), packed, layout)
    for _ in range(10):
        assert torch.equal(code_steps(values.to(GPU), packed, layout), first)


def test_messages_at_an_odd_place_are_refused(kernels):
    layout = step_layout(RowLayout(sizes=(300,), bits=(8,), wire=torch.bfloat16), 2)
    memory = torch.zeros(layout.num_bytes + 2, dtype=torch.uint8, device=GPU)
    packed = torch.zeros((1, layout.rows.packed_bytes), dtype=torch.uint8, device=GPU)
    with pytest.raises(ValueError, match="messages begins 2 bytes after a multiple of 16"):
        apply_code_steps(memory[2:].view(1, -1), packed, layout)
