"""The ops on CPU tensors: kernels in C++ for plain x86 and other processors, AVX2 and AVX-512."""

import ctypes
import logging
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from types import ModuleType

import torch
from torch import Tensor

from zeropp.native.kernels import cpu_library
from zeropp.native.library import LibraryError
from zeropp.quant import reference
from zeropp.quant.packing import FLOATS

_log = logging.getLogger("zeropp")


@cache
def backend() -> "CpuKernels | ModuleType":
    """The kernels, or the reference if they were not built; says so once, at INFO."""
    try:
        return CpuKernels(cpu_library())
    except LibraryError as error:
        _log.info("quantization on the CPU runs in plain PyTorch, which is slow: %s", error)
        return reference


@dataclass(frozen=True)
class CpuKernels:
    """The same functions as the reference's, on as many threads as PyTorch uses.

    Tensors must be contiguous and of the layout's shapes, which zeropp/quant/ops.py checks.
    """

    library: ctypes.CDLL

    def quantize(self, rows: Tensor, packed: Tensor, layout: Sequence[int], fold: int) -> None:
        table = array("q", layout)
        self.library.zpp_quantize(
            table.buffer_info()[0], rows.data_ptr(), FLOATS.index(rows.dtype), packed.data_ptr(),
            rows.shape[0], fold, torch.get_num_threads(),
        )  # fmt: skip

    def requantize(self, rows: Tensor, held: Tensor, packed: Tensor, layout: Sequence[int]) -> None:
        table = array("q", layout)
        self.library.zpp_requantize(
            table.buffer_info()[0], rows.data_ptr(), FLOATS.index(rows.dtype), held.data_ptr(),
            packed.data_ptr(), rows.shape[0], torch.get_num_threads(),
        )  # fmt: skip

    def dequantize(self, packed: Tensor, out: Tensor, layout: Sequence[int], fold: int) -> None:
        table = array("q", layout)
        self.library.zpp_dequantize(
            table.buffer_info()[0], packed.data_ptr(), out.data_ptr(), FLOATS.index(out.dtype),
            packed.shape[0], fold, torch.get_num_threads(),
        )  # fmt: skip

    def reduce_quantize(
        self, packed: Tensor, reduced: Tensor, layout: Sequence[int], layout_out: Sequence[int],
        terms: int,
    ) -> None:  # fmt: skip
        table, table_out = array("q", layout), array("q", layout_out)
        self.library.zpp_reduce_quantize(
            table.buffer_info()[0], packed.data_ptr(), table_out.buffer_info()[0],
            reduced.data_ptr(), reduced.shape[0], terms, torch.get_num_threads(),
        )  # fmt: skip

    def reduce_dequantize(self, packed: Tensor, out: Tensor, layout: Sequence[int]) -> None:
        table = array("q", layout)
        self.library.zpp_reduce_dequantize(
            table.buffer_info()[0], packed.data_ptr(), out.data_ptr(), FLOATS.index(out.dtype),
            packed.shape[0], torch.get_num_threads(),
        )  # fmt: skip
