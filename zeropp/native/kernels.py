"""The libraries of kernels, one for CPUs and one for NVIDIA GPUs, with the same functions.

Functions take addresses and numbers; what they need to know about the device comes last: on CPUs
the number of threads, on GPUs the device's index and the stream. Kernels on GPUs wait for nothing
and allocate nothing, so that a CUDA graph can capture them.
"""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from types import MappingProxyType

import torch

from zeropp.native.library import ADDRESS, INT, LibraryError, load

FOLDER = Path(__file__).parent
NO_CUDA = "they were not built here (no nvcc, or a PyTorch without CUDA at that time)"
ISAS = ("plain", "avx2", "avx512")  # instruction sets, in the order of csrc/shared/isa.h
FUNCTIONS = MappingProxyType(
    {
        # layout, rows, type of the rows, packed, number of rows, fold
        "zpp_quantize": (ADDRESS, ADDRESS, INT, ADDRESS, INT, INT),
        # layout, rows, type of the rows, packed rows that are held, packed, number of rows
        "zpp_requantize": (ADDRESS, ADDRESS, INT, ADDRESS, ADDRESS, INT),
        # layout, packed, out, type of out, number of rows, fold
        "zpp_dequantize": (ADDRESS, ADDRESS, ADDRESS, INT, INT, INT),
        # layout, packed, layout of the sums, packed sums, number of sums, terms
        "zpp_reduce_quantize": (ADDRESS, ADDRESS, ADDRESS, ADDRESS, INT, INT),
        # layout, packed, out, type of out, terms
        "zpp_reduce_dequantize": (ADDRESS, ADDRESS, ADDRESS, INT, INT),
        # an AdamCall, see csrc/adam/call.h
        "zpp_adam": (ADDRESS,),
        # a Coding, see csrc/messages/math.h, rows, held, coded, lengths, scratch
        "zpp_encode": (ADDRESS, ADDRESS, ADDRESS, ADDRESS, ADDRESS, ADDRESS),
        # a Coding, coded, lengths, rows, status, scratch
        "zpp_decode": (ADDRESS, ADDRESS, ADDRESS, ADDRESS, ADDRESS, ADDRESS),
    }
)
CPU_FUNCTIONS = MappingProxyType(
    {
        "zpp_set_isa": (INT,),
        # messages are coded on the host: row, held, a quarter of their bytes, symbols, others
        "zpp_differences": (ADDRESS, ADDRESS, INT, ADDRESS, ADDRESS),
        # symbols, others, number of others, a quarter of the row's bytes, row
        "zpp_add_differences": (ADDRESS, ADDRESS, INT, INT, ADDRESS),
        # three bytes each, how many, four bytes each
        "zpp_spread_threes": (ADDRESS, INT, ADDRESS),
        # four bytes each, how many, three bytes each
        "zpp_join_threes": (ADDRESS, INT, ADDRESS),
    }
)


@cache
def cpu_library() -> ctypes.CDLL:
    """The kernels for CPUs. Raises LibraryError if there are none to use."""
    functions = {name: (*types, INT) for name, types in FUNCTIONS.items()}
    library = load(FOLDER, "_cpu", functions | CPU_FUNCTIONS)
    library.zpp_differences.restype = library.zpp_add_differences.restype = INT
    return library


@dataclass(frozen=True)
class CudaLibrary:
    """The kernels for GPUs, which raise RuntimeError with CUDA's own message if a launch fails."""

    library: ctypes.CDLL

    @property
    def path(self) -> str:
        return self.library._name

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name not in FUNCTIONS:
            raise AttributeError(f"the library for GPUs has no function {name}")
        return partial(self._launch, name)

    def require_device(self, index: int) -> None:
        """Raise LibraryError if the kernels do not run on this GPU."""
        if error := self.library.zpp_ready(index):
            raise LibraryError(
                f"{self.path} does not run on {torch.cuda.get_device_name()}: "
                f"{self._message(error)}"
            )

    def _launch(self, name: str, *arguments: int) -> None:
        if error := getattr(self.library, name)(*arguments):
            raise RuntimeError(f"{name} on cuda:{arguments[-2]}: {self._message(error)}")

    def _message(self, error: int) -> str:
        return self.library.zpp_error(error).decode()


@cache
def cuda_library() -> CudaLibrary:
    """The kernels for GPUs. Raises LibraryError if there are none, or none for the current GPU."""
    library = load_cuda(FOLDER)
    library.require_device(torch.cuda.current_device())
    return library


def load_cuda(folder: Path) -> CudaLibrary:
    """The library for GPUs in `folder`, without asking whether it runs here."""
    functions = {name: (*types, INT, ADDRESS) for name, types in FUNCTIONS.items()}
    functions |= {"zpp_ready": (INT,), "zpp_error": (INT,)}
    library = load(folder, "_cuda", functions, NO_CUDA)
    library.zpp_error.restype = ctypes.c_char_p
    return CudaLibrary(library)
