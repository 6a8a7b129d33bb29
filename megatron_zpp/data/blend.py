"""Several datasets in one, in the proportions of their weights, as megatron-core blends them.

Before each sample k the dataset that is furthest behind its share, argmax of w * max(k, 1) - taken,
gives the next of its own samples; the first one wins a tie.

csrc/index/index.cpp does this sample by sample. If it was not built, NumPy does: the recurrence soon
forgets where it started, so many stretches of it run side by side from guessed counts, and every
stretch that did not start where the one before it ended is run again from there, until all fit.
The result is exactly the sequential one.
"""

import math

import numpy as np

from megatron_zpp.data.compiled_index import native
from megatron_zpp.data.split import normalize
from zeropp.errors import InputError

MAX_DATASETS = 32766  # the index is int16, as in megatron-core
CHUNK = 1 << 20  # samples counted at once: a blend is larger than memory should be
MIN_STRETCH = 512  # samples; below that there is nothing to gain


def parse_blend(paths: tuple[str, ...]) -> tuple[list[str], list[float] | None]:
    """Prefixes and weights of `weight prefix weight prefix ...`, or of prefixes alone (None).

    As in megatron-core an odd count, or no number where weights would stand, means prefixes alone.
    Raises InputError for a mixture and for weights that are not above 0.
    """
    if not paths:
        raise InputError("no data path given: expected a prefix, or weight and prefix pairs")
    weights = [_number(text) for text in paths[::2]]
    if len(paths) % 2 or all(weight is None for weight in weights):
        return [path.strip() for path in paths], None
    for text, weight in zip(paths[::2], weights, strict=True):
        if weight is None or not 0 < weight < math.inf:
            raise InputError(
                f"data path {' '.join(paths)!r}: {text!r} is no weight above 0; "
                "give weight and prefix pairs, or prefixes alone"
            )
    return [path.strip() for path in paths[1::2]], normalize(weights)


def blend_index(weights: list[float], size: int) -> tuple[np.ndarray, np.ndarray]:
    """For each of `size` samples: dataset int16 [size], and sample in that dataset int64 [size]."""
    assert 0 < len(weights) <= MAX_DATASETS
    shares = np.array(normalize(weights))
    return native().blend(shares, size) if native() else blend_in_stretches(shares, size)


def blend_in_stretches(
    shares: np.ndarray, size: int, min_stretch: int = MIN_STRETCH
) -> tuple[np.ndarray, np.ndarray]:
    """As `blend_index`, in NumPy, for shares [n] that add up to 1."""
    stretch = max(min_stretch, math.isqrt(size))
    firsts = np.arange(0, size, stretch)
    starts = _guess(shares, firsts)
    picks = np.empty((len(firsts), stretch), dtype=np.int16)
    ends = np.empty_like(starts)
    wrong = np.arange(len(firsts))
    while len(wrong):
        picks[wrong], ends[wrong] = _run(shares, firsts[wrong], starts[wrong], stretch)
        wrong = 1 + np.flatnonzero((starts[1:] != ends[:-1]).any(axis=1))
        starts[wrong] = ends[wrong - 1]
    dataset = picks.reshape(-1)[:size]
    return dataset, _numbered(dataset, len(shares))


def exhaustive_blend_index(sizes: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """As `blend_index` with the sizes as weights, each dataset taken exactly `sizes` times.

    Exact shares never overdraw a dataset before all are used up: the sum of w * k - taken is 0, so
    its largest is not negative, and a dataset used up is below. Rounded ones may by one sample.
    """
    shares, size = np.array(normalize(sizes)), sum(sizes)
    if native():
        return native().blend(shares, size, np.array(sizes))
    dataset, sample = blend_in_stretches(shares, size)
    if np.bincount(dataset, minlength=len(sizes)).tolist() != sizes:
        dataset = _one_by_one(sizes)
        sample = _numbered(dataset, len(sizes))
    return dataset, sample


def times_taken(dataset: np.ndarray, datasets: int) -> list[int]:
    """How many samples of each of the `datasets` a blend takes, for its index int16 [n]."""
    counts = np.zeros(datasets, dtype=np.int64)
    for start in range(0, len(dataset), CHUNK):
        counts += np.bincount(dataset[start : start + CHUNK], minlength=datasets)
    return counts.tolist()


class BlendedDataset:
    """Samples of `datasets` in the order of a `blend_index`."""

    def __init__(self, datasets: list, index: tuple[np.ndarray, np.ndarray]) -> None:
        self.datasets = datasets
        self.dataset_index, self.dataset_sample_index = index
        taken = times_taken(self.dataset_index, len(datasets))
        assert all(len(dataset) >= count for dataset, count in zip(datasets, taken, strict=True))

    def __len__(self) -> int:
        return len(self.dataset_index)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        """Sample `index`: dict(tokens int64 [S + 1])."""
        dataset = self.datasets[self.dataset_index[index]]
        return dataset[int(self.dataset_sample_index[index])]


def _numbered(dataset: np.ndarray, num_datasets: int) -> np.ndarray:
    """For each entry of `dataset` [n] how often the same one came before it; int64 [n]."""
    order = np.argsort(dataset, kind="stable")
    taken = np.bincount(dataset, minlength=num_datasets)
    sample = np.empty(len(dataset), dtype=np.int64)
    sample[order] = np.arange(len(dataset)) - np.repeat(np.cumsum(taken) - taken, taken)
    return sample


def _one_by_one(sizes: list[int]) -> np.ndarray:
    """The recurrence with datasets that drop out when they are used up; int16 [sum of sizes]."""
    shares, left = np.array(normalize(sizes)), np.array(sizes)
    counts, picks = np.zeros(len(sizes)), np.empty(sum(sizes), dtype=np.int16)
    for k in range(len(picks)):
        behind = np.where(left > 0, shares * max(k, 1) - counts, -np.inf)
        picks[k] = behind.argmax()
        counts[picks[k]] += 1
        left[picks[k]] -= 1
    return picks


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _guess(shares: np.ndarray, firsts: np.ndarray) -> np.ndarray:
    """Plausible counts [stretches, datasets] before the samples `firsts`; rows add up to them."""
    ideal = shares * firsts[:, None]
    counts = np.floor(ideal).astype(np.int64)
    rank = np.argsort(np.argsort(counts - ideal, axis=1, kind="stable"), axis=1)
    return counts + (rank < (firsts - counts.sum(axis=1))[:, None])


def _run(
    shares: np.ndarray, firsts: np.ndarray, starts: np.ndarray, steps: int
) -> tuple[np.ndarray, np.ndarray]:
    """Picks int16 [stretches, steps] of stretches side by side, and the counts at their ends."""
    counts, rows = starts.astype(np.float64), np.arange(len(firsts))
    picks = np.empty((steps, len(firsts)), dtype=np.int16)
    for step in range(steps):
        behind = shares * np.maximum(firsts + step, 1)[:, None] - counts
        picks[step] = behind.argmax(axis=1)
        counts[rows, picks[step]] += 1
    return picks.T, counts.astype(np.int64)
