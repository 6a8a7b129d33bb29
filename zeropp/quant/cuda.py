"""The compiled kernels for NVIDIA GPUs, where they were built, from csrc/cuda_*.cu.

They run on the current stream of the tensors' device, wait for nothing and allocate nothing but
what they return, so that a CUDA graph can hold them.
"""

import ctypes
import logging
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from zeropp.quant import library
from zeropp.quant.library import ADDRESS, NUMBER, Kernels
from zeropp.quant.packing import ALIGN

STEM = "_cuda"
FACTS = (("zpp_ready", (NUMBER,)), ("zpp_error", (NUMBER,)))
_log = logging.getLogger("zeropp")


@dataclass(frozen=True, kw_only=True)
class Cuda(Kernels):
    """The ops on tensors of one GPU."""

    def call(self, name: str, packed: Tensor, *arguments: object) -> None:
        """`run` on `packed`'s device.

        Raises ValueError where packed rows begin between two multiples of 16 bytes.
        """
        if packed.data_ptr() % ALIGN:
            raise ValueError(
                f"packed begins {packed.data_ptr() % ALIGN} bytes after a multiple of {ALIGN}; "
                "give it as quantize returned it, or whole rows of it"
            )
        self.run(name, packed.device, *arguments)

    def run(self, name: str, device: torch.device, *arguments: object) -> None:
        """Launch the library's `zpp_<name>` on the current stream of a device.

        Raises RuntimeError with CUDA's own words where the launch fails.
        """
        with torch.cuda.device(device):
            stream = torch.cuda.current_stream(device).cuda_stream
            function = getattr(self.library, f"zpp_{name}")
            if error := function(*arguments, device.index, stream):
                raise RuntimeError(f"{name} on {device}: {self.error(error)}")

    def error(self, number: int) -> str:
        """CUDA's text for an error."""
        return self.library.zpp_error(number).decode()


@cache
def cuda() -> Cuda | None:
    """The kernels, or `None` where none run on this GPU; says once, at INFO, which it is."""
    found = library.find(STEM)
    if found is None:
        why = "they were not built here (no nvcc, or a PyTorch without CUDA at that time)"
    elif (kernels := _load(found)) is None:
        why = f"{found} was built from other sources; install again (make setup)"
    elif error := kernels.library.zpp_ready(torch.cuda.current_device()):
        why = f"{found} does not run on {torch.cuda.get_device_name()}: {kernels.error(error)}"
    else:
        _log.info("quantization on GPUs runs in the kernels of %s", found.name)
        return kernels
    _log.info("quantization on GPUs runs in plain PyTorch, not in CUDA kernels: %s", why)
    return None


def _load(path: Path) -> Cuda | None:
    loaded = library.load(path, (NUMBER, ADDRESS), NUMBER, FACTS)
    if loaded is None:
        return None
    loaded.zpp_error.restype = ctypes.c_char_p
    return Cuda(library=loaded)
