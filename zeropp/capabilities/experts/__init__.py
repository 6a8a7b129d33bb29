"""Experts that ranks split: the way of tokens to them and back, and DeepSpeed's keys for it."""

from zeropp.exports import exports

__getattr__, __dir__, __all__ = exports(__name__, __file__)
