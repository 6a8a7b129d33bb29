"""The compiled kernels for CPUs, where they were built: plain, AVX2 and AVX-512."""

import logging
from dataclasses import dataclass
from functools import cache

import torch

from zeropp.quant import library
from zeropp.quant.library import NUMBER, Kernels

STEM = "_kernels"
ISAS = ("plain", "avx2", "avx512")
_log = logging.getLogger("zeropp")


@dataclass(frozen=True, kw_only=True)
class Native(Kernels):
    """The ops on tensors of the CPU, with as many threads as PyTorch uses."""

    def run(self, name: str, device: torch.device, *arguments: object) -> None:
        """Run the library's `zpp_<name>`."""
        getattr(self.library, f"zpp_{name}")(*arguments, torch.get_num_threads())

    def use(self, isa: str | None) -> bool:
        """Hold on to an instruction set of `ISAS`; `None`: the best there is. For tests.

        Returns whether this processor has it; if not, nothing changes.
        """
        return bool(self.library.zpp_set_isa(-1 if isa is None else ISAS.index(isa)))


@cache
def native() -> Native | None:
    """The kernels, or `None` where there are none that fit these sources; says so once, at INFO."""
    found = library.find(STEM)
    if found is None:
        why = "csrc/ was not built here (no compiler, or not installed with pip or make setup)"
    elif (loaded := library.load(found, (NUMBER,), None, (("zpp_set_isa", (NUMBER,)),))) is None:
        why = f"{found} was built from other sources; install again (make setup)"
    else:
        return Native(library=loaded)
    _log.info("quantization on the CPU runs in plain PyTorch, which is slow: %s", why)
    return None
