"""ZeRO and ZeRO++ for any PyTorch model, on top of FSDP2."""

from zeropp import zero
from zeropp.config import ZeroConfig
from zeropp.engine import Engine
from zeropp.errors import InputError
from zeropp.optim.loss_scale import LossScaler
from zeropp.optim.step import StepResult, optimizer_step
from zeropp.shard import shard
from zeropp.sharding import Sharding
from zeropp.start import initialize

__all__ = [
    "Engine", "InputError", "LossScaler", "Sharding", "StepResult", "ZeroConfig", "initialize",
    "optimizer_step", "shard", "zero",
]
__version__ = "0.1.0"
