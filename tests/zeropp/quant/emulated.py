"""The CUDA kernels, compiled by g++ to run on the CPU, warp by warp.

What this does not show is said in tests/zeropp/quant/emulated_cuda/cuda_runtime.h.
"""

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from zeropp.quant import library
from zeropp.quant.cuda import FACTS
from zeropp.quant.library import ADDRESS, NUMBER, Kernels
from zeropp.quant.packing import ALIGN

ROOT = Path(__file__).resolve().parents[3]
FLAGS = (
    "-std=c++17 -O1 -Wall -Wno-unknown-pragmas -ffp-contract=off -fno-strict-aliasing -fPIC "
    # An access that its type's size does not divide the place of ends the process, as on a GPU.
    "-shared -fsanitize=alignment -fsanitize-undefined-trap-on-error"
)


@dataclass(frozen=True, kw_only=True)
class Emulated(Kernels):
    """The library that a GPU would run, on the CPU."""

    def call(self, name: str, packed: Tensor, *arguments: object) -> None:
        assert packed.data_ptr() % ALIGN == 0
        self.run(name, packed.device, *arguments)

    def run(self, name: str, device: torch.device, *arguments: object) -> None:
        assert getattr(self.library, f"zpp_{name}")(*arguments, 0, None) == 0


def build(folder: Path) -> Emulated:
    """Compile csrc/cuda_*.cu into `folder`; skips the test where there is no compiler."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++ here to compile the emulated kernels")
    built = folder / "kernels.so"
    sources = [str(path) for path in sorted((ROOT / "csrc").glob("cuda_*.cu"))]
    headers = ["-I", str(ROOT / "tests/zeropp/quant/emulated_cuda")]
    command = [compiler, "-x", "c++", *FLAGS.split(), *headers, *sources, "-o", str(built)]
    subprocess.run(command, check=True)
    loaded = library.load(built, (NUMBER, ADDRESS), NUMBER, FACTS)
    assert loaded is not None
    return Emulated(library=loaded)
