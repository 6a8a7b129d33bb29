"""The ops on tensors of NVIDIA GPUs: kernels in CUDA C++, on the current stream of their device."""

import logging
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from types import ModuleType

import torch
from torch import Tensor

from zeropp.native.kernels import CudaLibrary, cuda_library
from zeropp.native.library import LibraryError
from zeropp.quant import reference
from zeropp.quant.packing import ALIGN, FLOATS

_log = logging.getLogger("zeropp")


@cache
def backend() -> "CudaKernels | ModuleType":
    """The kernels, or the reference if none run on this GPU; says once, at INFO, which it is."""
    try:
        kernels = CudaKernels(cuda_library())
    except LibraryError as error:
        _log.info("quantization on GPUs runs in plain PyTorch, not in CUDA kernels: %s", error)
        return reference
    _log.info("quantization on GPUs runs in the kernels of %s", kernels.library.path)
    return kernels


@dataclass(frozen=True)
class CudaKernels:
    """The same functions as zeropp/quant/reference.py.

    Tensors must be contiguous and of the layout's shapes, which zeropp/quant/ops.py checks. Raises
    ValueError for packed rows that do not start at a multiple of 16 bytes, RuntimeError with CUDA's
    own message if a launch fails.
    """

    library: CudaLibrary

    def quantize(self, rows: Tensor, packed: Tensor, layout: Sequence[int], fold: int) -> None:
        table = array("q", layout)
        with torch.cuda.device(rows.device):
            self.library.zpp_quantize(
                table.buffer_info()[0], rows.data_ptr(), FLOATS.index(rows.dtype),
                aligned_address(packed), rows.shape[0], fold,
                rows.device.index, torch.cuda.current_stream().cuda_stream,
            )  # fmt: skip

    def requantize(self, rows: Tensor, held: Tensor, packed: Tensor, layout: Sequence[int]) -> None:
        table = array("q", layout)
        with torch.cuda.device(rows.device):
            self.library.zpp_requantize(
                table.buffer_info()[0], rows.data_ptr(), FLOATS.index(rows.dtype),
                aligned_address(held), aligned_address(packed), rows.shape[0],
                rows.device.index, torch.cuda.current_stream().cuda_stream,
            )  # fmt: skip

    def dequantize(self, packed: Tensor, out: Tensor, layout: Sequence[int], fold: int) -> None:
        table = array("q", layout)
        with torch.cuda.device(out.device):
            self.library.zpp_dequantize(
                table.buffer_info()[0], aligned_address(packed), out.data_ptr(),
                FLOATS.index(out.dtype), packed.shape[0], fold,
                out.device.index, torch.cuda.current_stream().cuda_stream,
            )  # fmt: skip

    def reduce_quantize(
        self, packed: Tensor, reduced: Tensor, layout: Sequence[int], layout_out: Sequence[int],
        terms: int,
    ) -> None:  # fmt: skip
        table, table_out = array("q", layout), array("q", layout_out)
        with torch.cuda.device(packed.device):
            self.library.zpp_reduce_quantize(
                table.buffer_info()[0], aligned_address(packed), table_out.buffer_info()[0],
                aligned_address(reduced), reduced.shape[0], terms,
                packed.device.index, torch.cuda.current_stream().cuda_stream,
            )  # fmt: skip

    def reduce_dequantize(self, packed: Tensor, out: Tensor, layout: Sequence[int]) -> None:
        table = array("q", layout)
        with torch.cuda.device(out.device):
            self.library.zpp_reduce_dequantize(
                table.buffer_info()[0], aligned_address(packed), out.data_ptr(),
                FLOATS.index(out.dtype), packed.shape[0],
                out.device.index, torch.cuda.current_stream().cuda_stream,
            )  # fmt: skip


def aligned_address(packed: Tensor) -> int:
    """The address of packed rows; raises ValueError unless it is a multiple of `ALIGN`."""
    address = packed.data_ptr()
    if address % ALIGN:
        raise ValueError(
            f"packed begins {address % ALIGN} bytes after a multiple of {ALIGN}; "
            "give it as the op returned it, or whole rows of it"
        )
    return address
