"""`deepspeed.runtime.dataloader`: a loader that begins again at its end."""

from zeropp.deepspeed.whole_steps import RepeatingLoader

__all__ = ["RepeatingLoader"]
