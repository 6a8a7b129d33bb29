"""Blend several datasets in proportion to their weights, as megatron-core does.

Sample k is the next sample of the dataset that is furthest behind its share, that is, with the
largest w * max(k, 1) - taken; the first such dataset wins a tie.

csrc/index computes this sample by sample. Without it, NumPy computes it in parallel: the recurrence
soon forgets its initial counts, so many stretches of samples are computed side by side from guessed
counts, and every stretch that did not start from the counts at the end of the previous one is
computed again, until all match. The result is exactly the sequential one.
"""

import math

import numpy as np

from megatron_zpp.data.native_index import native_index
from megatron_zpp.data.split import normalize
from zeropp.errors import InputError

MAX_DATASETS = 32766  # the index is int16, as in megatron-core
CHUNK = 1 << 20  # samples that are counted at once, as an index may be larger than memory
MIN_STRETCH = 512  # samples; shorter stretches are not faster


def parse_blend(paths: tuple[str, ...]) -> tuple[list[str], list[float] | None]:
    """Return the prefixes and normalized weights of `weight prefix weight prefix ...`.

    The weights are None for prefixes alone: as in megatron-core, that is an odd number of paths, or
    no number in place of any weight. Raises InputError if only some weights are numbers, or if a
    weight is not above 0.
    """
    if not paths:
        raise InputError("no data path given: expected a prefix, or weight and prefix pairs")
    weights = [_parse_number(text) for text in paths[::2]]
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
    """Return the dataset of each of `size` samples, and the sample in that dataset.

    They are int16 [size] and int64 [size].
    """
    assert 0 < len(weights) <= MAX_DATASETS
    shares = np.array(normalize(weights))
    native = native_index()
    return native.blend(shares, size) if native else blend_in_stretches(shares, size)


def blend_in_stretches(
    shares: np.ndarray, size: int, min_stretch: int = MIN_STRETCH
) -> tuple[np.ndarray, np.ndarray]:
    """Return the arrays of `blend_index`, computed in NumPy, for shares [n] that add up to 1."""
    stretch = max(min_stretch, math.isqrt(size))
    first_samples = np.arange(0, size, stretch)
    initial_counts = _guess_counts(shares, first_samples)
    dataset = np.empty((len(first_samples), stretch), dtype=np.int16)
    final_counts = np.empty_like(initial_counts)
    stale = np.arange(len(first_samples))
    while len(stale):
        dataset[stale], final_counts[stale] = _compute_stretches(
            shares, first_samples[stale], initial_counts[stale], stretch
        )
        stale = 1 + np.flatnonzero((initial_counts[1:] != final_counts[:-1]).any(axis=1))
        initial_counts[stale] = final_counts[stale - 1]
    dataset = dataset.reshape(-1)[:size]
    return dataset, _sample_numbers(dataset, len(shares))


def exhaustive_blend_index(sizes: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Return the arrays of `blend_index` with weights `sizes`, with every sample exactly once.

    With exact shares no dataset is exhausted before the others: w * k - taken adds up to 0, so that
    its maximum is not negative, while an exhausted dataset is negative. Rounded shares may take one
    sample too many.
    """
    shares, size = np.array(normalize(sizes)), sum(sizes)
    native = native_index()
    if native:
        return native.blend(shares, size, np.array(sizes))
    dataset, sample = blend_in_stretches(shares, size)
    if np.bincount(dataset, minlength=len(sizes)).tolist() != sizes:
        dataset = _blend_sequentially(sizes)
        sample = _sample_numbers(dataset, len(sizes))
    return dataset, sample


def count_samples(dataset: np.ndarray, num_datasets: int) -> list[int]:
    """Return how many samples of each dataset are in a blend with the index `dataset` int16 [n]."""
    counts = np.zeros(num_datasets, dtype=np.int64)
    for start in range(0, len(dataset), CHUNK):
        counts += np.bincount(dataset[start : start + CHUNK], minlength=num_datasets)
    return counts.tolist()


class BlendedDataset:
    """The samples of `datasets` in the order of a `blend_index`."""

    def __init__(self, datasets: list, index: tuple[np.ndarray, np.ndarray]) -> None:
        self.datasets = datasets
        self.dataset_index, self.dataset_sample_index = index
        counts = count_samples(self.dataset_index, len(datasets))
        assert all(len(dataset) >= count for dataset, count in zip(datasets, counts, strict=True))

    def __len__(self) -> int:
        return len(self.dataset_index)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        """Return sample `index`: dict(tokens int64 [S + 1])."""
        dataset = self.datasets[self.dataset_index[index]]
        return dataset[int(self.dataset_sample_index[index])]


def _sample_numbers(dataset: np.ndarray, num_datasets: int) -> np.ndarray:
    """Return for each entry of `dataset` [n] the number of earlier entries of the same dataset."""
    order = np.argsort(dataset, kind="stable")
    counts = np.bincount(dataset, minlength=num_datasets)
    sample = np.empty(len(dataset), dtype=np.int64)
    sample[order] = np.arange(len(dataset)) - np.repeat(np.cumsum(counts) - counts, counts)
    return sample


def _blend_sequentially(sizes: list[int]) -> np.ndarray:
    """Return the dataset of each sample, skipping exhausted datasets; int16 [sum of sizes]."""
    shares, remaining = np.array(normalize(sizes)), np.array(sizes)
    counts, dataset = np.zeros(len(sizes)), np.empty(sum(sizes), dtype=np.int16)
    for k in range(len(dataset)):
        deficits = np.where(remaining > 0, shares * max(k, 1) - counts, -np.inf)
        dataset[k] = deficits.argmax()
        counts[dataset[k]] += 1
        remaining[dataset[k]] -= 1
    return dataset


def _parse_number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _guess_counts(shares: np.ndarray, first_samples: np.ndarray) -> np.ndarray:
    """Return likely counts [stretches, datasets] before `first_samples`, to which rows add up."""
    exact = shares * first_samples[:, None]
    counts = np.floor(exact).astype(np.int64)
    rank = np.argsort(np.argsort(counts - exact, axis=1, kind="stable"), axis=1)
    return counts + (rank < (first_samples - counts.sum(axis=1))[:, None])


def _compute_stretches(
    shares: np.ndarray, first_samples: np.ndarray, initial_counts: np.ndarray, num_samples: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the datasets int16 [stretches, num_samples], and the counts after each stretch."""
    counts, rows = initial_counts.astype(np.float64), np.arange(len(first_samples))
    dataset = np.empty((num_samples, len(first_samples)), dtype=np.int16)
    for step in range(num_samples):
        deficits = shares * np.maximum(first_samples + step, 1)[:, None] - counts
        dataset[step] = deficits.argmax(axis=1)
        counts[rows, dataset[step]] += 1
    return dataset.T, counts.astype(np.int64)
