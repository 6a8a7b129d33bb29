"""ZeRO and ZeRO++ for any PyTorch model, on top of FSDP2."""

from zeropp.config import ZeroConfig
from zeropp.errors import InputError
from zeropp.optim.loss_scale import LossScaler
from zeropp.optim.step import StepResult, optimizer_step
from zeropp.shard import shard
from zeropp.sharding import Sharding

__all__ = [
    "InputError", "LossScaler", "Sharding", "StepResult", "ZeroConfig", "optimizer_step", "shard",
]
__version__ = "0.1.0"
