"""The ops on tensors of NVIDIA GPUs: kernels in CUDA C++, on the current stream of their device."""

import logging
from array import array
from functools import cache
from types import ModuleType

import torch
from torch import Tensor

from zeropp.native.kernels import cuda_library
from zeropp.native.library import LibraryError
from zeropp.quant import reference
from zeropp.quant.kernels import Argument, Kernels, tables_in
from zeropp.quant.packing import ALIGN

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


class CudaKernels(Kernels):
    """Runs the functions on the current stream of the tensors' device.

    Raises ValueError for packed rows that do not start at a multiple of 16 bytes, RuntimeError with
    CUDA's own message if a launch fails.
    """

    def run(self, function: str, *arguments: Argument) -> None:
        memory = tables_in(arguments)
        device = next(each.device for each in memory if isinstance(each, Tensor))
        with torch.cuda.device(device):
            stream = torch.cuda.current_stream().cuda_stream
            getattr(self.library, function)(*map(_address, memory), device.index, stream)


def _address(argument: array | Tensor | int) -> int:
    if isinstance(argument, array):
        return argument.buffer_info()[0]
    if not isinstance(argument, Tensor):
        return argument
    return aligned_address(argument) if argument.dtype == torch.uint8 else argument.data_ptr()


def aligned_address(packed: Tensor) -> int:
    """The address of packed rows; raises ValueError unless it is a multiple of `ALIGN`."""
    address = packed.data_ptr()
    if address % ALIGN:
        raise ValueError(
            f"packed begins {address % ALIGN} bytes after a multiple of {ALIGN}; "
            "give it as the op returned it, or whole rows of it"
        )
    return address
