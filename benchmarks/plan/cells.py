"""Measured cells in `cells/`, predictions beside them, and errors over sets of them."""

import csv
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent / "cells"


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """A predicted number beside a measured one.

    of: what it is a number of. is_fitted: constants were chosen so that it comes out right.
    """

    of: str
    quantity: str
    predicted: float
    measured: float
    is_fitted: bool

    @classmethod
    def of_json(cls, cell: Mapping) -> "Prediction":
        """A prediction out of its JSON, which has its error too."""
        return cls(**{name: value for name, value in cell.items() if name != "error"})

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


@dataclass(frozen=True, kw_only=True)
class CheckedSet:
    """A set of cells with what was fitted, in words, and its targets: median and largest error."""

    name: str
    constants: str
    predictions: tuple[Prediction, ...]
    targets: tuple[tuple[str, float, float], ...] = ()  # quantity, median, largest


def read_cells(name: str) -> list[dict[str, str]]:
    """Return the rows of a file in `cells/`."""
    with open(FOLDER / name, newline="") as file:
        return list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))


def median_and_largest(predictions: Iterable[Prediction]) -> tuple[float, float]:
    """Return the median and the largest size of the errors."""
    errors = [abs(each.error) for each in predictions]
    return statistics.median(errors), max(errors)


def log_squares(pairs: Iterable[tuple[float, float]]) -> float:
    """Return the sum of squared logarithms of predicted / measured."""
    return sum(math.log(predicted / measured) ** 2 for predicted, measured in pairs)


def summary_rows(checked: Sequence[CheckedSet]) -> list[list[str]]:
    """Return a row for each set and quantity, fitted and predicted cells apart."""
    rows = []
    for each in checked:
        quantities = dict.fromkeys((p.quantity, p.is_fitted) for p in each.predictions)
        for quantity, is_fitted in quantities:
            chosen = [
                p for p in each.predictions if (p.quantity, p.is_fitted) == (quantity, is_fitted)
            ]
            median, largest = median_and_largest(chosen)
            target = "-"
            for name, at_most, most in each.targets:
                if name == quantity and not is_fitted:
                    is_met = median <= at_most and largest <= most
                    target = f"{at_most:.0%}, {most:.0%}: {'met' if is_met else 'missed'}"
            rows.append(
                [
                    each.name, quantity, "fitted" if is_fitted else "predicted", str(len(chosen)),
                    f"{median:.1%}", f"{largest:.1%}", target,
                ]
            )  # fmt: skip
    return rows
