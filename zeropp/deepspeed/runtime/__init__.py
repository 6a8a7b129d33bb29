"""`deepspeed.runtime`: where programs look for the engine's class and the schedules' names."""

from zeropp.deepspeed.names import attribute_of
from zeropp.deepspeed.runtime import lr_schedules

__all__ = ["lr_schedules"]

__getattr__ = attribute_of(__name__)
