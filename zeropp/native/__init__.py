"""The compiled libraries of csrc/: whether they are current, and the functions they have."""

from zeropp.exports import exports

__getattr__, __dir__, __all__ = exports(__name__, __file__)
