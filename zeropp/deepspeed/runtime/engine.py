"""`deepspeed.runtime.engine`: the engine's class by its DeepSpeed name."""

from zeropp.deepspeed.engine import Engine as DeepSpeedEngine

__all__ = ["DeepSpeedEngine"]
