"""Local SGD (DiLoCo): replicas train independently and synchronize every n steps."""

from zeropp.exports import exports

__getattr__, __dir__, __all__ = exports(__name__, __file__)
