"""Which sequences of a dataset train, which validate and which test: Megatron's `--split`."""

import math
import re

import numpy as np

from zeropp.errors import InputError

SPLITS = ("train", "valid", "test")


def normalize(weights: tuple[float, ...] | list[float]) -> list[float]:
    """Weights that add up to 1, in the arithmetic of megatron-core (its bits decide ties)."""
    array = np.array(weights, dtype=np.float64)
    return (array / np.sum(array)).tolist()


def parse_split(text: str) -> tuple[tuple[float, float] | None, ...]:
    """Bounds of the three splits as fractions of the dataset; None for a split without weight.

    `text` is up to three weights, as in "969, 30, 1" or "96%/3%/1%". Raises InputError for what is
    none, and for signs and letters, in "-1" or "1e3", which megatron-core reads as separators.
    """
    numbers = re.findall(r"[.0-9]+", text)
    valid = not re.search(r"[-+]|[^\W\d]", text) and 1 <= len(numbers) <= len(SPLITS)
    if not valid or any(number.count(".") > 1 or number == "." for number in numbers):
        raise InputError(f"--split {text!r}: expected up to three weights, as in '969, 30, 1'")
    weights = [float(number) for number in numbers]
    if not 0 < sum(weights) < math.inf:
        raise InputError(f"--split {text!r}: the weights must add up to a number above 0")
    shares = normalize(weights + [0.0] * (len(SPLITS) - len(weights)))
    bounds = [0.0]
    for share in shares:
        bounds.append(bounds[-1] + share)
    pairs = zip(bounds[:-1], bounds[1:], strict=True)
    return tuple((low, high) if low < high else None for low, high in pairs)


def sequence_range(bounds: tuple[float, float], sequences: int) -> range:
    """Sequences of a split in a dataset of so many; possibly none."""
    low, high = bounds
    return range(int(round(low * float(sequences))), int(round(high * float(sequences))))
