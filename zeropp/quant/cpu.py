"""The ops on CPU tensors: kernels in C++ for plain x86 and other processors, AVX2 and AVX-512."""

import logging
from array import array
from functools import cache
from types import ModuleType

import torch
from torch import Tensor

from zeropp.native.kernels import cpu_library
from zeropp.native.library import LibraryError
from zeropp.quant import reference
from zeropp.quant.kernels import Argument, Kernels, tables_in

_log = logging.getLogger("zeropp")


@cache
def backend() -> "CpuKernels | ModuleType":
    """The kernels, or the reference if they were not built; says so once, at INFO."""
    try:
        return CpuKernels(cpu_library())
    except LibraryError as error:
        _log.info("quantization on the CPU runs in plain PyTorch, which is slow: %s", error)
        return reference


class CpuKernels(Kernels):
    """Runs the functions on as many threads as PyTorch uses."""

    def run(self, function: str, *arguments: Argument) -> None:
        memory = tables_in(arguments)
        getattr(self.library, function)(*map(_address, memory), torch.get_num_threads())


def _address(argument: array | Tensor | int) -> int:
    if isinstance(argument, array):
        return argument.buffer_info()[0]
    return argument.data_ptr() if isinstance(argument, Tensor) else argument
