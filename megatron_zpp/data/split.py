"""Divide the sequences of a dataset into training, validation and test: Megatron's `--split`."""

import math
import re

import numpy as np

from zeropp.errors import InputError

SPLITS = ("train", "valid", "test")


def normalize(weights: tuple[float, ...] | list[float]) -> list[float]:
    """Return weights that add up to 1, with the rounding of megatron-core, which decides ties."""
    array = np.array(weights, dtype=np.float64)
    return (array / np.sum(array)).tolist()


def parse_split(text: str) -> tuple[tuple[float, float] | None, ...]:
    """Return the bounds of the three splits as fractions of the dataset; None for zero weight.

    `text` is up to three weights, as in "969, 30, 1" or "96%/3%/1%". Raises InputError for other
    text, and for signs and letters, as in "-1" or "1e3", which megatron-core reads as separators.
    """
    numbers = re.findall(r"[.0-9]+", text)
    is_valid = not re.search(r"[-+]|[^\W\d]", text) and 1 <= len(numbers) <= len(SPLITS)
    if not is_valid or any(number.count(".") > 1 or number == "." for number in numbers):
        raise InputError(f"--split {text!r}: expected up to three weights, as in '969, 30, 1'")
    weights = [float(number) for number in numbers]
    if not 0 < sum(weights) < math.inf:
        raise InputError(f"--split {text!r}: the weights must add up to a number above 0")
    shares = normalize(weights + [0.0] * (len(SPLITS) - len(weights)))
    bounds = []
    low = 0.0
    for share in shares:
        high = low + share
        bounds.append((low, high) if low < high else None)
        low = high
    return tuple(bounds)


def sequence_range(bounds: tuple[float, float], num_sequences: int) -> range:
    """Return the sequences of a split in a dataset of `num_sequences`; the range may be empty."""
    low, high = bounds
    return range(int(round(low * float(num_sequences))), int(round(high * float(num_sequences))))
