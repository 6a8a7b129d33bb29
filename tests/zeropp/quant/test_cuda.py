"""The CUDA kernels on a GPU: on any stream, in a CUDA graph, in large memory."""

import pytest
import torch

from tests.gpu import MARKS
from tests.zeropp.quant.layout_ops import LayoutOps, reference
from tests.zeropp.quant.packed_bytes import (
    any_rows,
    bytes_of,
)
from tests.zeropp.quant.reference_checks import (
    UNTOUCHED,
    other_bits,
)
from zeropp.quant import cuda
from zeropp.quant.cuda import CudaKernels
from zeropp.quant.ops import dequantize, quantize, reduce_dequantize, reduce_quantize
from zeropp.quant.packing import RowLayout

GPU = "cuda:0"
CYCLES = 200_000_000  # a tenth of a second: far longer than a launch
pytestmark = MARKS


@pytest.fixture(scope="module")
def kernels() -> LayoutOps:
    backend = cuda.backend()
    if not isinstance(backend, CudaKernels):
        pytest.skip("csrc/ is not built for this GPU: install again where nvcc is")
    return LayoutOps(backend)


def test_elements_beyond_2_to_the_31(kernels):
    size, tail = (1 << 31) + 5000, 4096 + 8
    if torch.cuda.mem_get_info(0)[0] < 16 << 30:
        pytest.skip("this takes 12 GB of the GPU's memory")
    rows = torch.zeros(1, size, dtype=torch.bfloat16, device=GPU)
    first = (size - tail) // 1024 * 1024  # a tile's
    end = any_rows(1, size - first, torch.bfloat16, 1)
    rows[:, first:] = end.to(GPU)
    layout = RowLayout(sizes=(size,), bits=(8,), wire=torch.bfloat16)
    packed = kernels.quantize(rows, layout, 1)
    short = RowLayout(sizes=(size - first,), bits=(8,), wire=torch.bfloat16)
    expected, (segment,) = reference.quantize(end, short, 1), layout.segments
    codes = packed[:, segment.data_at + first :].cpu()
    assert torch.equal(codes, expected[:, short.segments[0].data_at :])
    scales = packed[:, segment.scales_at + first // 256 * 2 : segment.data_at].cpu()
    count = -(-(size - first) // 256) * 2
    assert torch.equal(scales[:, :count], expected[:, :count])
    kernels.dequantize(packed, rows, layout, 1)
    values = torch.empty_like(end)
    reference.dequantize(expected, values, short, 1)
    assert torch.equal(bytes_of_values(rows[:, first:]), bytes_of_values(values))


def bytes_of_values(values: torch.Tensor) -> torch.Tensor:
    return torch.where(values.isnan(), torch.nan, values).cpu().contiguous().view(torch.uint8)


def test_the_ops_use_the_kernels(kernels):
    layout = RowLayout(sizes=(300, 5, 129), bits=(8, 16, 4), wire=torch.bfloat16)
    rows = any_rows(4, layout.elements, torch.bfloat16, 1)
    packed = quantize(rows.to(GPU), layout, fold=2)
    assert torch.equal(packed.cpu(), quantize(rows, layout, fold=2))
    onto = other_bits(layout)
    reduced = reduce_quantize(packed, layout, onto, terms=2)
    expected = reduce_quantize(packed.cpu(), layout, onto, terms=2)
    assert torch.equal(bytes_of(reduced.cpu(), onto), bytes_of(expected, onto))
    nothing = torch.empty(0, layout.packed_bytes, dtype=torch.uint8, device=GPU)
    total = torch.ones(layout.elements, device=GPU)
    reduce_dequantize(nothing, total, layout)
    assert (total == 0).all()
    assert quantize(rows[:0].to(GPU), layout).shape == (0, layout.packed_bytes)


def test_it_runs_on_the_current_stream_and_waits_for_nothing(kernels):
    """The rows are written behind a long wait: elsewhere, a kernel would read what was there."""
    layout = RowLayout(sizes=(1 << 16, 77), bits=(8, 4), wire=torch.bfloat16)
    rows = any_rows(2, layout.elements, torch.float32, 1)
    late, now = rows.pin_memory(), torch.zeros_like(rows, device=GPU)
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(CYCLES)
        now.copy_(late, non_blocking=True)
        packed = kernels.quantize(now, layout, 1)
        reduced = kernels.reduce_quantize(packed, layout, layout, 2)
        out = torch.empty_like(now[0])
        kernels.reduce_dequantize(reduced, out, layout)
        kernels.dequantize(packed, now, layout, 1)
        finished = side.record_event()
    assert not finished.query()
    side.synchronize()
    expected = reference.quantize(rows, layout, 1)
    assert torch.equal(packed.cpu(), expected)
    assert torch.equal(reduced.cpu(), reference.reduce_quantize(expected, layout, layout, 2))


def test_a_graph_holds_all_four_and_replays_them_on_new_numbers(kernels):
    layout = RowLayout(sizes=(4096, 77, 300), bits=(8, 16, 4), wire=torch.bfloat16)
    rows = torch.zeros(4, layout.elements, device=GPU)
    out, total = torch.empty_like(rows), torch.empty_like(rows[0])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        packed = quantize(rows, layout, fold=2)
        reduced = reduce_quantize(packed, layout, layout, terms=2)
        dequantize(packed, out, layout, fold=2)
        reduce_dequantize(reduced, total, layout)
    for seed in (1, 2):
        fresh = any_rows(4, layout.elements, torch.float32, seed)
        rows.copy_(fresh)
        graph.replay()
        expected = reference.quantize(fresh, layout, 2)
        assert torch.equal(bytes_of(packed.cpu(), layout), bytes_of(expected, layout))
        sums = reference.reduce_quantize(expected, layout, layout, 2)
        assert torch.equal(bytes_of(reduced.cpu(), layout), bytes_of(sums, layout))
        values, summed = torch.empty_like(fresh), torch.empty_like(fresh[0])
        reference.dequantize(expected, values, layout, 2)
        reference.reduce_dequantize(sums, summed, layout)
        assert torch.equal(bytes_of_values(out), bytes_of_values(values))
        assert torch.equal(bytes_of_values(total), bytes_of_values(summed))


def test_the_same_bytes_every_time(kernels):
    layout = RowLayout(sizes=(1 << 20, 333), bits=(4, 8), wire=torch.bfloat16)
    rows = any_rows(8, layout.elements, torch.float32, 1).to(GPU)
    packed = kernels.quantize(rows, layout, 1)
    first = kernels.reduce_quantize(packed, layout, layout, 8)
    for _ in range(10):
        again = torch.full_like(first, UNTOUCHED)
        kernels.reduce_quantize_into(packed, again, layout, layout)
        assert torch.equal(first, again)
