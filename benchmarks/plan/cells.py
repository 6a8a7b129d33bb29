"""Measured cells in `cells/`, predictions beside them, errors over sets, and fits to them."""

import csv
import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent / "cells"
POINTS, ROUNDS = 9, 7  # of a fit: of a grid, and grids that close in on the best point
CLOSER = 1.5 / (POINTS - 1)  # of a range, to both sides of the best point: the next round's range
NEAR_BOUND = 0.005  # of the value
Cell = dict[str, str]


@dataclass(frozen=True)
class Prediction:
    """A predicted number of `of` beside a measured one.

    is_fitted: constants were chosen so that it comes out right.
    """

    of: str
    quantity: str
    predicted: float
    measured: float
    is_fitted: bool = False

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


@dataclass(frozen=True)
class CheckedSet:
    """A set of cells with what was fitted, in words, and its targets: median and largest error."""

    name: str
    constants: str
    predictions: tuple[Prediction, ...]
    targets: tuple[tuple[str, float, float], ...] = ()  # quantity, median, largest


@dataclass(frozen=True)
class Bounds:
    """A constant's name, the physical limits of its value, and the reasons of both."""

    name: str
    lowest: float
    highest: float
    reasons: tuple[str, str]

    def describe(self, value: float) -> str:
        """The value, and which limit decided if it is at one."""
        for limit, reason in zip((self.lowest, self.highest), self.reasons, strict=True):
            if abs(value / limit - 1) < NEAR_BOUND:
                return f"{self.name} {value:.3g} (AT ITS BOUND: {reason})"
        return f"{self.name} {value:.3g}"


def read_cells(name: str) -> list[Cell]:
    """Return the rows of a file in `cells/`."""
    with open(FOLDER / name, newline="") as file:
        return list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))


def median_and_largest(errors: Iterable[float]) -> tuple[float, float]:
    """Return the median and the largest size of errors."""
    sizes = [abs(error) for error in errors]
    return statistics.median(sizes), max(sizes)


def log_squares(pairs: Iterable[tuple[float, float]]) -> float:
    """Return the sum of squared logarithms of predicted / measured."""
    return sum(math.log(predicted / measured) ** 2 for predicted, measured in pairs)


def fit(
    loss: Callable[[Sequence[float]], float], bounds: Sequence[Bounds]
) -> tuple[tuple[float, ...], str]:
    """Return the constants of the smallest loss within the bounds, and a line that says them.

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
            best = min(best, (loss([math.exp(each) for each in point]), point))
        ranges = [
            (max(least, at - CLOSER * (high - low)), min(most, at + CLOSER * (high - low)))
            for at, (low, high), (least, most) in zip(best[1], ranges, logs, strict=True)
        ]
    constants = tuple(math.exp(each) for each in best[1])
    return constants, ", ".join(map(Bounds.describe, bounds, constants))


def summary_rows(sets: Sequence[Mapping]) -> list[list[str]]:
    """Return a row for each set, as JSON, and quantity; fitted and predicted cells apart."""
    rows = []
    for each in sets:
        errors: dict[tuple[str, bool], list[float]] = {}
        for cell in each["cells"]:
            errors.setdefault((cell["quantity"], cell["is_fitted"]), []).append(cell["error"])
        for (quantity, is_fitted), chosen in errors.items():
            median, largest = median_and_largest(chosen)
            target = "-"
            for name, at_most, most in each["targets"]:
                if name == quantity and not is_fitted:
                    is_met = median <= at_most and largest <= most
                    target = f"{at_most:.0%}, {most:.0%}: {'met' if is_met else 'missed'}"
            kind = "fitted" if is_fitted else "predicted"
            shown = f"{median:.1%}", f"{largest:.1%}"
            rows.append([each["name"], quantity, kind, str(len(chosen)), *shown, target])
    return rows
