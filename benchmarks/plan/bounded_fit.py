"""Least squares within bounds, by grids that close in on the best point."""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

POINTS, ROUNDS = 9, 7
CLOSER = 1.5 / (POINTS - 1)  # of a range, to both sides of the best point: the next round's range
NEAR_BOUND = 0.005  # of the value


@dataclass(frozen=True)
class Bounds:
    """A constant's name, the physical limits of its value, and the reasons of both."""

    name: str
    lowest: float
    highest: float
    reasons: tuple[str, str]


def fit(
    loss: Callable[[Sequence[float]], float], bounds: Sequence[Bounds]
) -> tuple[tuple[float, ...], str]:
    """Return the constants of the smallest loss, and a line that says them.

    The line says which constants are at a bound, where the physical limit decided.
    """
    logs = [(math.log(each.lowest), math.log(each.highest)) for each in bounds]
    ranges = list(logs)
    best: tuple[float, tuple[float, ...]] = (math.inf, ())
    for _ in range(ROUNDS):
        axes = [
            [low + (high - low) * i / (POINTS - 1) for i in range(POINTS)] for low, high in ranges
        ]
        for point in itertools.product(*axes):
            value = loss([math.exp(each) for each in point])
            best = min(best, (value, point))
        ranges = [
            (
                max(limit[0], at - CLOSER * (high - low)),
                min(limit[1], at + CLOSER * (high - low)),
            )
            for at, (low, high), limit in zip(best[1], ranges, logs, strict=True)
        ]
    constants = tuple(math.exp(each) for each in best[1])
    return constants, ", ".join(map(_describe, bounds, constants))


def _describe(bounds: Bounds, value: float) -> str:
    text = f"{bounds.name} {value:.3g}"
    limits = bounds.lowest, bounds.highest
    for limit, reason in zip(limits, bounds.reasons, strict=True):
        if abs(value / limit - 1) < NEAR_BOUND:
            return f"{text} (AT ITS BOUND: {reason})"
    return text
