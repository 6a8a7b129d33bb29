"""The CUDA kernels, compiled by g++ to run on the CPU, warp by warp.

tests/zeropp/quant/emulated_cuda/cuda_runtime.h says what this does not show.
"""

import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.zeropp.quant.layout_ops import LayoutOps
from zeropp.native.kernels import CudaLibrary, load_cuda
from zeropp.native.library import SUFFIX, source_hash
from zeropp.quant.cpu import CpuKernels

ROOT = Path(__file__).resolve().parents[3]
FLAGS = (
    "-std=c++17 -O1 -Wall -Wno-unknown-pragmas -ffp-contract=off -fno-strict-aliasing -fPIC "
    # A misaligned access ends the process, as on a GPU.
    "-shared -fsanitize=alignment -fsanitize-undefined-trap-on-error "
    "-DZPP_MAX_GRID=5 "
    "-U_FORTIFY_SOURCE"  # which forbids _longjmp to another stack
)


@dataclass(frozen=True)
class EmulatedLibrary:
    """The library that a GPU would run, on the CPU, called as the library for CPUs is.

    Its functions take a device and a stream where those take the number of threads.
    """

    library: CudaLibrary

    def __getattr__(self, name: str) -> Callable[..., None]:
        function = getattr(self.library, name)
        return lambda *arguments: function(*arguments[:-1], 0, None)

    def layout_ops(self) -> LayoutOps:
        """The four ops."""
        return LayoutOps(CpuKernels(self), slow=True)


def load(folder: Path) -> EmulatedLibrary:
    """The library that was compiled into `folder`."""
    return EmulatedLibrary(load_cuda(folder))


def build(folder: Path) -> None:
    """Compile the CUDA sources into `folder`, unless they are there compiled already.

    Skips the test if there is no compiler.
    """
    target = folder / ("_cuda" + SUFFIX)
    if target.exists():
        return
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++ here to compile the emulated kernels")
    csrc = ROOT / "csrc"
    sources = [*sorted(csrc.glob("*/*.cu")), csrc / "shared/source_hash.cpp"]
    subprocess.run(
        [compiler, "-x", "c++", *FLAGS.split(), f"-DZPP_SOURCE_HASH={source_hash()}",
         "-I", str(ROOT / "tests/zeropp/quant/emulated_cuda"), *map(str, sources),
         "-o", str(target)],
        check=True,
    )  # fmt: skip
