"""Optimizers and the optimizer step; public names are imported when they are first used."""

from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zeropp.capabilities.muon.muon import Muon
    from zeropp.optim.adam import FusedAdam
    from zeropp.optim.cpu_adam import CPUAdam

__all__ = ["CPUAdam", "FusedAdam", "Muon"]

_MODULES = MappingProxyType(
    {
        "CPUAdam": "zeropp.optim.cpu_adam",
        "FusedAdam": "zeropp.optim.adam",
        "Muon": "zeropp.capabilities.muon.muon",
    }
)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'zeropp.optim' has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
