"""The CUDA kernels on a GPU: the bytes of the reference, on any stream and in a CUDA graph."""

from array import array

import pytest
import torch

from tests.gpu import MARKS
from tests.zeropp.quant.layout_ops import LayoutOps, reference
from tests.zeropp.quant.packed_bytes import (
    RAGGED,
    any_rows,
    bytes_of,
    every_16_bit_number,
    ragged_layouts,
)
from tests.zeropp.quant.reference_checks import (
    UNTOUCHED,
    check_requantized,
    check_rows,
    check_sums,
    many_segments,
    other_bits,
    with_dirty_gaps,
)
from zeropp.quant import cuda
from zeropp.quant.cuda import CudaKernels
from zeropp.quant.ops import dequantize, quantize, reduce_dequantize, reduce_quantize
from zeropp.quant.packing import FLOATS, ROTATED_4, RowLayout

GPU = "cuda:0"
CYCLES = 200_000_000  # a tenth of a second: far longer than a launch
ROWS = 70_000  # more than a grid has in y or z
pytestmark = MARKS


@pytest.fixture(scope="module")
def kernels() -> LayoutOps:
    backend = cuda.backend()
    if not isinstance(backend, CudaKernels):
        pytest.skip("csrc/ is not built for this GPU: install again where nvcc is")
    return LayoutOps(backend)


@pytest.mark.parametrize("shift", [0, 1, 3])
@pytest.mark.parametrize("wire", FLOATS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_rows_of_ragged_segments(kernels, dtype, wire, shift):
    for seed, layout in enumerate(ragged_layouts(wire)):
        for count, fold in ((1, 1), (6, 1), (6, 2), (6, 3), (4, 4)):
            rows = any_rows(count, layout.elements, dtype, seed)
            check_rows(kernels, rows, layout, fold, GPU, shift)


@pytest.mark.parametrize("terms", [*range(1, 10), 17])
def test_sums_of_ragged_segments(kernels, terms):
    for seed in range(len(RAGGED)):
        layout = ragged_layouts(FLOATS[(seed + terms) % 3])[seed]
        rows = any_rows(2 * terms, layout.elements, torch.float32, seed + 10 * terms)
        packed = reference.quantize(rows, layout, 1)
        for onto in (layout, other_bits(layout), other_bits(other_bits(layout))):
            check_sums(kernels, packed, layout, onto, terms, GPU, terms % 2)


@pytest.mark.parametrize("bits", [2, 3, 4, ROTATED_4, 8, 16])
@pytest.mark.parametrize("dtype", FLOATS)
def test_segments_that_only_wide_accesses_touch(kernels, dtype, bits):
    layout = RowLayout(sizes=(3072, 768, 1 << 20), bits=(bits,) * 3, wire=dtype)
    packed = check_rows(kernels, any_rows(4, layout.elements, dtype, bits), layout, 2, GPU)
    for onto_bits in (2, 3, 4, ROTATED_4, 8, 16):
        onto = RowLayout(sizes=layout.sizes, bits=(onto_bits,) * 3, wire=dtype)
        check_sums(kernels, packed, layout, onto, 4, GPU)


@pytest.mark.parametrize("count", [56, 57, 300])
def test_more_segments_than_a_launch_takes(kernels, count):
    layout = many_segments(count, FLOATS[count % 3])
    packed = check_rows(kernels, any_rows(2, layout.elements, torch.float32, 1), layout, 1, GPU)
    check_requantized(kernels, any_rows(2, layout.elements, torch.float32, 1), layout, GPU)
    check_sums(kernels, packed, layout, other_bits(layout), 2, GPU)


@pytest.mark.parametrize("fold", [1, ROWS])
def test_more_rows_than_a_grid_has(kernels, fold):
    layout = RowLayout(sizes=(5, 3), bits=(8, 16), wire=torch.float16)
    check_rows(kernels, any_rows(ROWS, 8, torch.float32, fold), layout, fold, GPU)


def test_gaps_are_not_read(kernels):
    for seed, layout in enumerate(ragged_layouts(torch.bfloat16)):
        clean = reference.quantize(any_rows(4, layout.elements, torch.float32, seed), layout, 1)
        packed = with_dirty_gaps(clean, layout)
        check_sums(kernels, packed, layout, other_bits(layout), 2, GPU)


@pytest.mark.parametrize("dtype", FLOATS)
def test_every_16_bit_number_and_all_its_neighbours_in_fp32(kernels, dtype):
    rows = every_16_bit_number(dtype)
    for wire in FLOATS:
        check_rows(kernels, rows, RowLayout(sizes=(rows.numel(),), bits=(16,), wire=wire), 1, GPU)
    for bits in (4, 8):
        layout = RowLayout(sizes=(rows.numel(),), bits=(bits,), wire=torch.float32)
        packed = check_rows(kernels, rows, layout, 1, GPU)
        check_sums(kernels, packed, layout, other_bits(layout), 1, GPU)


@pytest.mark.parametrize("bits", [4, 8])
def test_reciprocals_and_products_round_alike_for_scales_of_all_sizes(kernels, bits):
    """A block for each exponent and each of the 128 bf16 fractions, then ties at every code."""
    top = 1 << (bits - 1)
    scales = torch.arange(128 << 7, 254 << 7, dtype=torch.int32).mul(1 << 16).view(torch.float32)
    scales = torch.cat((scales, 1 / scales))
    steps = torch.arange(-2 * top, 2 * top + 1) / 2
    block = {8: 256, 4: 128}[bits]
    for part in steps.split(block - 1):
        part = torch.nn.functional.pad(part.clamp(-top, top), (1, block - 1 - len(part)), value=top)
        rows = (scales[:, None] * part * 2.0**-20).reshape(1, -1)
        layout = RowLayout(sizes=(rows.numel(),), bits=(bits,), wire=torch.float32)
        check_rows(kernels, rows, layout, 1, GPU)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 2.0**-95])
@pytest.mark.parametrize("dtype", FLOATS)
def test_blocks_without_a_scale(kernels, dtype, value):
    layout = RowLayout(sizes=(600, 600), bits=(8, 4), wire=dtype)
    in_one_place, everywhere = (any_rows(2, 1200, dtype, 2).nan_to_num() for _ in range(2))
    in_one_place[:, 257] = value
    everywhere[:] = value
    for rows in (in_one_place, everywhere):
        packed = check_rows(kernels, rows, layout, 1, GPU)
        check_sums(kernels, packed, layout, other_bits(layout), 2, GPU)


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


def test_packed_rows_at_an_odd_place_are_refused(kernels):
    layout = RowLayout(sizes=(300,), bits=(8,), wire=torch.bfloat16)
    memory = torch.zeros(2 * layout.packed_bytes + 2, dtype=torch.uint8, device=GPU)
    odd = memory[2:].view(2, -1)
    with pytest.raises(ValueError, match="2 bytes after a multiple of 16"):
        dequantize(odd, torch.empty(2, 300, device=GPU), layout)


def test_a_failed_launch_says_why(kernels):
    library = kernels.backend.library
    layout = array("q", RowLayout(sizes=(8,), bits=(8,), wire=torch.bfloat16).table)
    with pytest.raises(RuntimeError, match="zpp_quantize on cuda:99: .*device"):
        library.zpp_quantize(layout.buffer_info()[0], 0, 0, 0, 1, 1, 99, None)
    assert library.library.zpp_ready(0) == 0
