"""Muon: momentum whose matrices are orthogonalized where their rows are."""

from zeropp.exports import exports

__getattr__, __dir__, __all__ = exports(__name__, __file__)
