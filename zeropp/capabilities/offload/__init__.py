"""ZeRO-Offload: fp32 weights, moments and the step, or all weights, in host memory."""

from zeropp.exports import exports

__getattr__, __dir__, __all__ = exports(__name__, __file__)
