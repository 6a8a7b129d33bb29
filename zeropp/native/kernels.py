"""The libraries of kernels, one for CPUs and one for NVIDIA GPUs, with the same functions.

Functions take addresses and numbers; what they need to know about the device comes last: on CPUs
the number of threads, on GPUs the device's index and the stream. Kernels on GPUs wait for nothing
and allocate nothing, so that a CUDA graph can capture them.
"""

import ctypes
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from zeropp.native.library import ADDRESS, INT, LibraryError, load

FOLDER = Path(__file__).parent
ISAS = ("plain", "avx2", "avx512")  # instruction sets, in the order of csrc/shared/isa.h
FUNCTIONS = MappingProxyType({
    # layout, rows, type of the rows, packed, number of rows, fold
    "zpp_quantize": (ADDRESS, ADDRESS, INT, ADDRESS, INT, INT),
    # layout, packed, out, type of out, number of rows, fold
    "zpp_dequantize": (ADDRESS, ADDRESS, ADDRESS, INT, INT, INT),
    # layout, packed, layout of the sums, packed sums, number of sums, terms
    "zpp_reduce_quantize": (ADDRESS, ADDRESS, ADDRESS, ADDRESS, INT, INT),
    # layout, packed, out, type of out, terms
    "zpp_reduce_dequantize": (ADDRESS, ADDRESS, ADDRESS, INT, INT),
    # layout, rows, type of the rows, packed, messages, number of rows
    "zpp_code_steps": (ADDRESS, ADDRESS, INT, ADDRESS, ADDRESS, INT),
    # layout, messages, packed, number of rows
    "zpp_apply_code_steps": (ADDRESS, ADDRESS, ADDRESS, INT),
    # an AdamCall, see csrc/adam/call.h
    "zpp_adam": (ADDRESS,),
})  # fmt: skip


@cache
def cpu_library() -> ctypes.CDLL:
    """The kernels for CPUs. Raises LibraryError if there are none to use."""
    functions = {name: (*types, INT) for name, types in FUNCTIONS.items()}
    return load(FOLDER, "_cpu", functions | {"zpp_set_isa": (INT,)})


@cache
def cuda_library() -> ctypes.CDLL:
    """The kernels for GPUs. Raises LibraryError if there are none, or none for the current GPU.

    Its functions raise RuntimeError with CUDA's own message if a launch fails.
    """
    library = load_cuda(FOLDER)
    if error := library.zpp_ready(torch.cuda.current_device()):
        raise LibraryError(
            f"{library._name} does not run on {torch.cuda.get_device_name()}: "
            f"{library.zpp_error(error).decode()}"
        )
    return library


def load_cuda(folder: Path) -> ctypes.CDLL:
    """The library for GPUs in `folder`, without asking whether it runs here."""
    functions = {name: (*types, INT, ADDRESS) for name, types in FUNCTIONS.items()}
    library = load(
        folder, "_cuda", functions | {"zpp_ready": (INT,), "zpp_error": (INT,)},
        "they were not built here (no nvcc, or a PyTorch without CUDA at that time)",
    )  # fmt: skip
    library.zpp_error.restype = ctypes.c_char_p

    def raise_on_error(error: int, function: Any, arguments: tuple[Any, ...]) -> None:
        if error:
            device = f"cuda:{arguments[-2]}"
            raise RuntimeError(
                f"{function.__name__} on {device}: {library.zpp_error(error).decode()}"
            )

    for name in FUNCTIONS:
        getattr(library, name).errcheck = raise_on_error
    return library
