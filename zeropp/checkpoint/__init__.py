"""Checkpoints of sharded models: what is saved, and what decides that a checkpoint is complete."""

from zeropp.exports import exports

__getattr__, __dir__, __all__ = exports(__name__, __file__)
