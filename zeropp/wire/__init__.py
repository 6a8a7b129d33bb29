"""What travels between ranks: by which hops, in which format, and how many bytes."""

from zeropp.exports import exports

__getattr__, __dir__, __all__ = exports(__name__, __file__)
