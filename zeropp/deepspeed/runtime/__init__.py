"""`deepspeed.runtime`: where programs look for the engine's class and the schedules' names."""

from zeropp.deepspeed.runtime import lr_schedules

__all__ = ["lr_schedules"]
