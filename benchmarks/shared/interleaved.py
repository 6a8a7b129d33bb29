"""Timing several pieces of work in turn, so that a busy machine slows all of them alike."""

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from math import comb
from typing import TypeVar

Item = TypeVar("Item")
Work = Callable[[], object]


class Disagreement(RuntimeError):
    """Pieces of work that should compute the same do not, so they are not timed."""


def interleaved(items: Sequence[Item], rounds: int) -> Iterator[Item]:
    """Yield each item once per round; every second round runs backwards."""
    for number in range(rounds):
        yield from reversed(items) if number % 2 else items


def time_interleaved(
    works: Mapping[str, Work], rounds: int, seconds_of: Callable[[Work], float]
) -> dict[str, list[float]]:
    """Seconds of each work by name, one value per round."""
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for name in interleaved(list(works), rounds):
        seconds[name].append(seconds_of(works[name]))
    return seconds


def ratio_summary(times: Sequence[float], reference: Sequence[float]) -> dict:
    """Median and quartiles of times / reference, round by round."""
    ratios = [time / other for time, other in zip(times, reference, strict=True)]
    return {"ratio": statistics.median(ratios), "quartiles": quartiles(ratios)}


def quartiles(values: Sequence[float]) -> list[float]:
    """First and third quartile; of fewer than four values the smallest and the largest."""
    if len(values) < 4:
        return [min(values), max(values)]
    low, _, high = statistics.quantiles(values, n=4)
    return [low, high]


def median_interval(values: Sequence[float]) -> list[float]:
    """The 95% confidence interval of the median; of fewer than six values, smallest and largest."""
    below = accumulate(comb(len(values), count) / 2 ** len(values) for count in range(len(values)))
    left_out = max(0, sum(tail <= 0.025 for tail in below) - 1)
    return [sorted(values)[left_out], sorted(values)[-1 - left_out]]


def median_of(name: str) -> Callable[[Mapping], float]:
    """A function of a row that returns the median of its values of that name."""
    return lambda row: statistics.median(row[name])
