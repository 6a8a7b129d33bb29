"""The CUDA kernels on the CPU, warp by warp: which element goes where, against the reference.

tests/zeropp/quant/emulated_cuda/cuda_runtime.h says what the emulation does not show.
"""

import logging
from array import array

import pytest
import torch

from tests.zeropp.quant.emulated_kernels import EmulatedLibrary
from tests.zeropp.quant.layout_ops import LayoutOps
from tests.zeropp.quant.packed_bytes import RAGGED, any_rows, ragged_layouts
from tests.zeropp.quant.reference_checks import (
    check_requantized,
    check_rows,
    check_sums,
    many_segments,
    other_bits,
    with_dirty_gaps,
)
from zeropp.native import kernels as native_kernels
from zeropp.quant import cuda, reference
from zeropp.quant.packing import FLOATS, ROTATED_4, RowLayout


@pytest.fixture
def kernels(emulated: EmulatedLibrary) -> LayoutOps:
    return emulated.layout_ops()


@pytest.mark.parametrize("shift", [0, 3])
@pytest.mark.parametrize("dtype", FLOATS)
def test_rows_of_ragged_segments(kernels, dtype, shift):
    for seed, wire in enumerate((*FLOATS, *FLOATS)):
        layout = ragged_layouts(wire)[seed]
        rows = any_rows(6, layout.elements, dtype, seed)
        for fold in (2, 3):
            check_rows(kernels, rows, layout, fold, shift=shift)
        check_requantized(kernels, rows, layout, shift=shift)


@pytest.mark.parametrize("terms", [1, 2, 3, 4, 5, 9])
def test_sums_of_ragged_segments(kernels, terms):
    for seed in range(len(RAGGED)):
        layout = ragged_layouts(FLOATS[(seed + terms) % 3])[seed]
        rows = any_rows(2 * terms, layout.elements, torch.float32, seed + 10 * terms)
        packed = kernels.quantize(rows, layout, 1)
        for onto in (layout, other_bits(layout), other_bits(other_bits(layout))):
            check_sums(kernels, packed, layout, onto, terms, shift=terms % 2)


@pytest.mark.parametrize("bits", [2, 3, 4, ROTATED_4, 8, 16])
@pytest.mark.parametrize("dtype", FLOATS)
def test_segments_that_only_wide_accesses_touch(kernels, dtype, bits):
    layout = RowLayout(sizes=(3072, 768, 2048 + 64), bits=(bits,) * 3, wire=dtype)
    packed = check_rows(kernels, any_rows(4, layout.elements, dtype, bits), layout, 2)
    for onto_bits in (2, 3, 4, ROTATED_4, 8, 16):
        onto = RowLayout(sizes=layout.sizes, bits=(onto_bits,) * 3, wire=dtype)
        check_sums(kernels, packed, layout, onto, 4)


@pytest.mark.parametrize("count", [55, 56, 57, 120])
def test_more_segments_than_a_launch_takes(kernels, count):
    layout = many_segments(count, FLOATS[count % 3])
    packed = check_rows(kernels, any_rows(2, layout.elements, torch.float32, count), layout, 1)
    check_requantized(kernels, any_rows(2, layout.elements, torch.float32, count), layout)
    check_sums(kernels, packed, layout, other_bits(layout), 2)


@pytest.mark.parametrize("fold", [1, 2, 6, 12])
def test_more_rows_than_a_grid_takes(kernels, fold):
    """The emulation's grids have 5 blocks in y and z, a GPU's 65535."""
    layout = RowLayout(sizes=(300, 5), bits=(8, 16), wire=torch.bfloat16)
    packed = check_rows(kernels, any_rows(12, layout.elements, torch.float32, fold), layout, fold)
    check_sums(kernels, packed, layout, other_bits(layout), 12 // fold)


def test_gaps_are_not_read(kernels):
    for seed, layout in enumerate(ragged_layouts(torch.bfloat16)):
        clean = kernels.quantize(any_rows(4, layout.elements, torch.float32, seed), layout, 1)
        packed = with_dirty_gaps(clean, layout)
        check_sums(kernels, packed, layout, other_bits(layout), 2)


def test_without_the_library_the_reference_runs_and_the_log_says_so_once(
    monkeypatch, tmp_path, caplog
):
    monkeypatch.setattr(native_kernels, "FOLDER", tmp_path)
    native_kernels.cuda_library.cache_clear()
    cuda.backend.cache_clear()
    try:
        with caplog.at_level(logging.INFO, "zeropp"):
            assert cuda.backend() is cuda.backend() is reference
    finally:
        cuda.backend.cache_clear()
    assert [record.message for record in caplog.records] == [
        "quantization on GPUs runs in plain PyTorch, not in CUDA kernels: they were not built here "
        "(no nvcc, or a PyTorch without CUDA at that time)"
    ]


def test_an_error_has_cudas_message(emulated):
    assert emulated.library.library.zpp_ready(0) == 0
    assert emulated.library.library.zpp_ready(99) != 0
    layout = array("q", RowLayout(sizes=(8,), bits=(8,), wire=torch.bfloat16).table)
    with pytest.raises(RuntimeError, match="^zpp_quantize on cuda:99: invalid device ordinal$"):
        emulated.library.zpp_quantize(layout.buffer_info()[0], 0, 0, 0, 1, 1, 99, None)


@pytest.mark.parametrize("offset", [2, 8])
def test_packed_rows_must_be_aligned(offset):
    memory = torch.zeros(64, dtype=torch.uint8)
    start = -memory.data_ptr() % 16
    assert cuda.aligned_address(memory[start:]) % 16 == 0
    with pytest.raises(ValueError, match=f"begins {offset} bytes after a multiple of 16"):
        cuda.aligned_address(memory[start + offset :])
