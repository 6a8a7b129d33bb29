"""`zeropp.zero`, the counterpart of `deepspeed.zero`: `Init` and `GatheredParameters`."""

from zeropp.deepspeed.zero import GatheredParameters, Init

__all__ = ["GatheredParameters", "Init"]
