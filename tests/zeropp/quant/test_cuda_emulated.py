"""The CUDA kernels on the CPU, warp by warp: which element goes where, against the reference.

What the emulation does not show is said in tests/zeropp/quant/emulated_cuda/cuda_runtime.h.
"""

import ctypes
import logging

import pytest
import torch

from tests.zeropp.quant.against_reference import (
    check_rows,
    check_sums,
    many_segments,
    other_bits,
    with_dirty_gaps,
)
from tests.zeropp.quant.emulated import Emulated
from tests.zeropp.quant.packed_rows import RAGGED, any_rows, ragged_layouts
from zeropp.quant import cuda, library, ops, reference
from zeropp.quant.packing import FLOATS, Layout


@pytest.fixture
def kernels(emulated: Emulated) -> Emulated:
    return emulated


@pytest.mark.parametrize("shift", [0, 3])
@pytest.mark.parametrize("dtype", FLOATS)
def test_rows_of_ragged_segments(kernels, dtype, shift):
    for seed, wire in enumerate((*FLOATS, *FLOATS)):
        layout = ragged_layouts(wire)[seed]
        rows = any_rows(6, layout.elements, dtype, seed)
        for fold in (2, 3):
            check_rows(kernels, rows, layout, fold, shift=shift)


@pytest.mark.parametrize("terms", [1, 2, 3, 4, 5, 9])
def test_sums_of_ragged_segments(kernels, terms):
    for seed in range(len(RAGGED)):
        layout = ragged_layouts(FLOATS[(seed + terms) % 3])[seed]
        rows = any_rows(2 * terms, layout.elements, torch.float32, seed + 10 * terms)
        packed = kernels.quantize(rows, layout, 1)
        for onto in (layout, other_bits(layout), other_bits(other_bits(layout))):
            check_sums(kernels, packed, layout, onto, terms, shift=terms % 2)


@pytest.mark.parametrize("bits", [4, 8, 16])
@pytest.mark.parametrize("dtype", FLOATS)
def test_segments_that_only_wide_accesses_touch(kernels, dtype, bits):
    layout = Layout(sizes=(3072, 768, 2048 + 16), bits=(bits,) * 3, wire=dtype)
    packed = check_rows(kernels, any_rows(4, layout.elements, dtype, bits), layout, 2)
    for onto_bits in (4, 8, 16):
        onto = Layout(sizes=layout.sizes, bits=(onto_bits,) * 3, wire=dtype)
        check_sums(kernels, packed, layout, onto, 4)


@pytest.mark.parametrize("count", [55, 56, 57, 120])
def test_more_segments_than_a_launch_takes(kernels, count):
    layout = many_segments(count, FLOATS[count % 3])
    packed = check_rows(kernels, any_rows(2, layout.elements, torch.float32, count), layout, 1)
    check_sums(kernels, packed, layout, other_bits(layout), 2)


def test_what_lies_in_gaps_is_not_read(kernels):
    for seed, layout in enumerate(ragged_layouts(torch.bfloat16)):
        clean = kernels.quantize(any_rows(4, layout.elements, torch.float32, seed), layout, 1)
        packed = with_dirty_gaps(clean, layout)
        check_sums(kernels, packed, layout, other_bits(layout), 2)


def test_without_the_library_the_reference_runs_and_the_log_says_so_once(
    monkeypatch, tmp_path, caplog
):
    monkeypatch.setattr(library, "FOLDER", tmp_path)
    cuda.cuda.cache_clear()
    try:
        with caplog.at_level(logging.INFO, "zeropp"):
            assert ops.on_cuda() is ops.on_cuda() is reference
    finally:
        cuda.cuda.cache_clear()
    assert [one.message for one in caplog.records] == [
        "quantization on GPUs runs in plain PyTorch, not in CUDA kernels: they were not built here "
        "(no nvcc, or a PyTorch without CUDA at that time)"
    ]


def test_an_error_has_cudas_words(kernels):
    number = kernels.library.zpp_ready(99)
    kernels.library.zpp_error.restype = ctypes.c_char_p
    assert cuda.Cuda(library=kernels.library).error(number) == "invalid device ordinal"
    assert kernels.library.zpp_ready(0) == 0
