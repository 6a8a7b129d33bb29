"""ZeRO++ in DeepSpeed's shape: for programs that say `deepspeed`, with their import changed.

    from zeropp import deepspeed
    from zeropp.deepspeed.ops.adam import DeepSpeedCPUAdam

    engine, optimizer, loader, schedule = deepspeed.initialize(model=model, config="ds.json")

Modules and names are where DeepSpeed has them. `initialize` and `DeepSpeedEngine` are
`zeropp.initialize` and `zeropp.Engine`. Names are imported when they are first used.
`names/names.toml` has DeepSpeed's other names, and those that are refused when they are used.
"""

from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from zeropp.deepspeed import names

if TYPE_CHECKING:
    from zeropp.deepspeed import accelerator, checkpoint, comm, ops, runtime, utils, zero
    from zeropp.deepspeed.accelerator import get_accelerator
    from zeropp.deepspeed.build_engine import initialize
    from zeropp.deepspeed.comm import init_distributed
    from zeropp.deepspeed.engine import Engine as DeepSpeedEngine
    from zeropp.deepspeed.runtime.activation_checkpointing import checkpointing
    from zeropp.deepspeed.runtime.arguments import add_config_arguments

__all__ = [
    "DeepSpeedEngine",
    "accelerator",
    "add_config_arguments",
    "checkpoint",
    "checkpointing",
    "comm",
    "get_accelerator",
    "init_distributed",
    "initialize",
    "ops",
    "runtime",
    "utils",
    "zero",
]

__version__ = "0.18.1+zeropp"  # of the DeepSpeed whose interface and defaults these are
__version_major__, __version_minor__, __version_patch__ = 0, 18, 1
__git_hash__ = __git_branch__ = None

_SUBMODULES = ("accelerator", "checkpoint", "comm", "ops", "runtime", "utils", "zero")
_MODULES = MappingProxyType(
    {
        "DeepSpeedEngine": "zeropp.deepspeed.runtime.engine",
        "add_config_arguments": "zeropp.deepspeed.runtime.arguments",
        "get_accelerator": "zeropp.deepspeed.accelerator",
        "init_distributed": "zeropp.deepspeed.comm",
        "initialize": "zeropp.deepspeed.build_engine",
    }
)


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return import_module(f"{__name__}.{name}")
    if name == "checkpointing":
        return import_module(f"{__name__}.runtime.activation_checkpointing.checkpointing")
    if name in _MODULES:
        return getattr(import_module(_MODULES[name]), name)
    return names.attribute_of(__name__)(name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


names.add_modules()
