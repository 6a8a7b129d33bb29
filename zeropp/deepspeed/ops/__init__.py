"""`deepspeed.ops`: optimizers."""

from zeropp.deepspeed.names import attribute_of

__getattr__ = attribute_of(__name__)
