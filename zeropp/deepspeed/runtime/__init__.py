"""`deepspeed.runtime`: its configuration, schedules, data, and small functions."""

from zeropp.deepspeed.names import attribute_of

__getattr__ = attribute_of(__name__)
