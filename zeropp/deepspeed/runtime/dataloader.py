"""`deepspeed.runtime.dataloader`: a loader that begins again at its end."""

from zeropp.deepspeed.names import attribute_of
from zeropp.deepspeed.whole_steps import RepeatingLoader

__all__ = ["RepeatingLoader"]

__getattr__ = attribute_of(__name__)
