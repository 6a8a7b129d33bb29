"""Expert parallelism: dispatch of tokens to experts, combine, and DeepSpeed's keys for it."""

from zeropp.exports import exports

__getattr__, __dir__, __all__ = exports(__name__, __file__)
