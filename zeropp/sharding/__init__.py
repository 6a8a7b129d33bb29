"""How a model is cut into shards, and what a step must know about them."""

from zeropp.exports import exports

__getattr__, __dir__, __all__ = exports(__name__, __file__)
