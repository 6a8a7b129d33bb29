"""Blend several datasets in proportion to their weights, as megatron-core does.

Sample k is the next sample of the dataset that is furthest behind its share, that is, with the
largest w * max(k, 1) - taken; the first such dataset wins a tie.

csrc/index computes this; without it the same loop runs in Python, which is some 20 times as slow.
"""

import math
from collections.abc import Callable

import numpy as np

from megatron_zpp.data.native_index import native_index
from megatron_zpp.data.split import normalize
from zeropp.errors import InputError

MAX_DATASETS = 32766  # the index is int16, as in megatron-core
CHUNK = 1 << 20  # samples that are counted at once, as an index may be larger than memory


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
                f"data path {' '.join(paths)!r}: {text!r} is not a weight above 0; "
                "give weight and prefix pairs, or prefixes alone"
            )
    return [path.strip() for path in paths[1::2]], normalize(weights)


def blend_index(weights: list[float], size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the dataset of each of `size` samples, and the sample in that dataset.

    They are int16 [size] and int64 [size].
    """
    assert 0 < len(weights) <= MAX_DATASETS
    return _blend()(np.array(normalize(weights)), size)


def exhaustive_blend_index(sizes: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Return the arrays of `blend_index` with weights `sizes`, with every sample exactly once.

    With exact shares no dataset is exhausted before the others: w * k - taken adds up to 0, so that
    its maximum is not negative, while an exhausted dataset is negative. Rounded shares may take one
    sample too many, so datasets drop out when they are exhausted.
    """
    return _blend()(np.array(normalize(sizes)), sum(sizes), np.array(sizes))


def blend_in_python(
    shares: np.ndarray, size: int, limits: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Return what `NativeIndex.blend` returns, for shares [n] that add up to 1 and limits [n]."""
    dataset, sample = np.empty(size, dtype=np.int16), np.empty(size, dtype=np.int64)
    counts = np.zeros(len(shares))
    for k in range(size):
        behind = shares * max(k, 1) - counts
        if limits is not None:
            behind[counts == limits] = -np.inf
        dataset[k] = number = behind.argmax()
        sample[k] = counts[number]
        counts[number] += 1
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
        self._counts = count_samples(self.dataset_index, len(datasets))
        pairs = zip(datasets, self._counts, strict=True)
        assert all(len(dataset) >= count for dataset, count in pairs)

    def __len__(self) -> int:
        return len(self.dataset_index)

    def epochs(self, num_samples: float) -> tuple[float, ...]:
        """How often `num_samples` samples go through the text of each dataset."""
        share = num_samples / len(self)
        pairs = zip(self.datasets, self._counts, strict=True)
        return tuple(epochs for each, count in pairs for epochs in each.epochs(count * share))

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        """Return sample `index`: dict(tokens int64 [S + 1])."""
        dataset = self.datasets[self.dataset_index[index]]
        return dataset[int(self.dataset_sample_index[index])]


def _blend() -> Callable[..., tuple[np.ndarray, np.ndarray]]:
    native = native_index()
    return native.blend if native else blend_in_python


def _parse_number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
