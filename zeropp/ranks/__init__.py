"""Which ranks there are, how they are started, and what they do together."""

from zeropp.exports import exports

__getattr__, __dir__, __all__ = exports(__name__, __file__)
