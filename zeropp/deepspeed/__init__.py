"""ZeRO++ in DeepSpeed's shape: for programs that say `deepspeed`, with their import changed.

    from zeropp import deepspeed
    from zeropp.deepspeed.ops.adam import DeepSpeedCPUAdam

    engine, optimizer, loader, schedule = deepspeed.initialize(model=model, config="ds.json")

Modules and names are where DeepSpeed has them. `initialize` and `DeepSpeedEngine` are
`zeropp.initialize` and `zeropp.Engine`. Names are imported when they are first used.
`names/names.toml` says where they are, and which are refused when they are used.
"""

from typing import TYPE_CHECKING

from zeropp.deepspeed import names

if TYPE_CHECKING:
    from zeropp.deepspeed import accelerator, checkpoint, comm, ops, runtime, utils, zero
    from zeropp.deepspeed.accelerator import get_accelerator
    from zeropp.deepspeed.build_engine import initialize
    from zeropp.deepspeed.comm import init_distributed
    from zeropp.deepspeed.engine import Engine as DeepSpeedEngine
    from zeropp.deepspeed.runtime import checkpointing
    from zeropp.deepspeed.runtime.functions import add_config_arguments

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

names.add_modules()
__getattr__ = names.attribute_of(__name__)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
