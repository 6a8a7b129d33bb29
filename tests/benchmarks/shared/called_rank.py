"""A module whose function ranks call."""

import os

from benchmarks.shared.interleaved import Disagreement
from zeropp.ranks.topology import Environment


def on_rank(number: int) -> list[int]:
    """Return the number, and how many ranks there are; fail where the environment asks for it."""
    if "DISAGREES" in os.environ:
        raise Disagreement("a and b differ")
    return [number, Environment.read().world_size]
