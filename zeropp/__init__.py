"""ZeRO and ZeRO++ for any PyTorch model, on top of FSDP2.

The names below are imported when they are first used, so that programs that need only errors or
file handling start without importing torch.
"""

from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zeropp import optim, zero
    from zeropp.deepspeed.build_engine import initialize
    from zeropp.deepspeed.engine import Engine
    from zeropp.errors import InputError
    from zeropp.optim.adam import FusedAdam
    from zeropp.optim.local_steps.any_trainer import NodeSteps, local_steps
    from zeropp.optim.loss_scale import LossScaler
    from zeropp.optim.step_or_skip import StepResult, optimizer_step
    from zeropp.settings.zero_config import ZeroConfig
    from zeropp.sharding.attach import Attached, attach
    from zeropp.sharding.shard import shard
    from zeropp.sharding.sharding import Sharding

__all__ = [
    "Attached",
    "Engine",
    "FusedAdam",
    "InputError",
    "LossScaler",
    "NodeSteps",
    "Sharding",
    "StepResult",
    "ZeroConfig",
    "attach",
    "initialize",
    "local_steps",
    "optim",
    "optimizer_step",
    "shard",
    "zero",
]
__version__ = "0.1.0"

_SUBPACKAGES = ("optim", "zero")
_MODULES = MappingProxyType(
    {
        "Attached": "zeropp.sharding.attach",
        "Engine": "zeropp.deepspeed.engine",
        "FusedAdam": "zeropp.optim.adam",
        "InputError": "zeropp.errors",
        "LossScaler": "zeropp.optim.loss_scale",
        "NodeSteps": "zeropp.optim.local_steps.any_trainer",
        "Sharding": "zeropp.sharding.sharding",
        "StepResult": "zeropp.optim.step_or_skip",
        "ZeroConfig": "zeropp.settings.zero_config",
        "attach": "zeropp.sharding.attach",
        "initialize": "zeropp.deepspeed.build_engine",
        "local_steps": "zeropp.optim.local_steps.any_trainer",
        "optimizer_step": "zeropp.optim.step_or_skip",
        "shard": "zeropp.sharding.shard",
    }
)


def __getattr__(name: str) -> Any:
    if name in _SUBPACKAGES:
        return import_module(f"zeropp.{name}")
    if name not in _MODULES:
        raise AttributeError(f"module 'zeropp' has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(_MODULES[name]), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
