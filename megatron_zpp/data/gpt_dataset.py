"""Samples of S + 1 tokens for training, validation and test, the same as megatron-core 0.19.2's.

`build_datasets` opens the files, divides their sequences by `--split` (or takes one blend for each
split), and blends. Every rank calls it; the index arrays are cached on disk and built once for all
that share the folder.
"""

import logging
import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from megatron_zpp.data.blend import BlendedDataset, parse_blend, times_taken
from megatron_zpp.data.index_cache import IndexCache
from megatron_zpp.data.indexed_dataset import IndexedDataset
from megatron_zpp.data.mock import MockDataset
from megatron_zpp.data.sample_index import SampleRequest
from megatron_zpp.data.split import SPLITS, parse_split, sequence_range
from megatron_zpp.settings.config import DataConfig
from zeropp.errors import InputError

SURPLUS = 0.005  # a blended dataset is built this much longer than its share, as in megatron-core

logger = logging.getLogger("megatron_zpp")


@dataclass(frozen=True, kw_only=True)
class SampleSpec:
    """What is the same for all datasets of a run."""

    seq_length: int
    seed: int
    vocab_size: int
    cache: IndexCache


class Place(NamedTuple):
    """A piece of one sequence of a file: `length` tokens from `offset` on."""

    sequence: int
    offset: int
    length: int


class GPTDataset:
    """At least `num_samples` shuffled samples (None: those of one epoch) of a range of sequences.

    Without a single token in the range there is nothing to build: the caller sees to that.
    """

    def __init__(
        self,
        source: IndexedDataset,
        sequences: range,
        split: str,
        num_samples: int | None,
        spec: SampleSpec,
    ) -> None:
        if source.dtype.kind == "f":
            raise InputError(
                f"{source.idx_path} gives its tokens the type {source.dtype.name}: token ids are "
                "whole numbers; preprocess the text again"
            )
        self.source, self.spec = source, spec
        request = SampleRequest(
            sequences=sequences,
            seq_length=spec.seq_length,
            num_samples=num_samples,
            seed=spec.seed,
        )
        self.index = spec.cache.sample_index(source.lengths, request, source.prefix, split)

    def __len__(self) -> int:
        return len(self.index.shuffle)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        """Sample `index`: dict(tokens int64 [S + 1]); InputError for a foreign token id."""
        parts = [self.source.get(*place) for place in self.places(index)]
        tokens = np.concatenate(parts, dtype=np.int64)
        self._check_vocabulary(tokens)
        return {"tokens": tokens}

    def places(self, index: int) -> list[Place]:
        """The pieces of the file that sample `index` is made of, in order."""
        row = int(self.index.shuffle[index])
        (first, offset), (last, end) = self.index.sample[row : row + 2].tolist()
        sequences = self.index.document[first : last + 1].tolist()
        if first == last:
            return [Place(sequences[0], offset, end + 1 - offset)]
        whole = [int(self.source.lengths[sequence]) for sequence in sequences[:-1]]
        starts = [offset] + [0] * (len(whole) - 1)
        pieces = zip(sequences[:-1], starts, whole, strict=True)
        places = [Place(sequence, start, length - start) for sequence, start, length in pieces]
        return [*places, Place(sequences[-1], 0, end + 1)]

    def _check_vocabulary(self, tokens: np.ndarray) -> None:
        # Here and not once for the whole file: a file of terabytes is never read twice.
        vocab_size = self.spec.vocab_size
        if tokens.max() < vocab_size and tokens.min() >= 0:
            return
        wrong = tokens[(tokens < 0) | (tokens >= vocab_size)][0]
        raise InputError(
            f"{self.source.bin_path} holds token id {wrong}, but the tokenizer's vocabulary has "
            f"{vocab_size} entries (ids 0 to {vocab_size - 1}): preprocess the text with this "
            "tokenizer, or give the tokenizer that wrote it"
        )


def build_datasets(
    data: DataConfig,
    seq_length: int,
    sizes: tuple[int | None, int | None, int | None],
    seed: int,
    vocab_size: int,
    cache_required: bool = True,
) -> "tuple[GPTDataset | BlendedDataset | MockDataset | None, ...]":
    """Training, validation and test data of at least `sizes` samples; None for a split without.

    A size of None means every sample of one epoch once. Prefixes without weights never make more
    than that. Raises InputError for missing, damaged or insufficient data, for weights without a
    size, and if the indices cannot be kept (without `cache_required` a warning says so).
    """
    if data.mock_data:
        seeds = [(seed, number) for number in range(len(SPLITS))]
        return tuple(
            MockDataset(size, seq_length, vocab_size, key) if size else None
            for size, key in zip(sizes, seeds, strict=True)
        )
    spec = SampleSpec(
        seq_length=seq_length,
        seed=seed,
        vocab_size=vocab_size,
        cache=IndexCache(data.data_cache_path, cache_required),
    )
    paths = (data.train_data_path, data.valid_data_path, data.test_data_path)
    builder = _Builder(spec, data.split if data.data_path is not None else None)
    if data.data_path is not None:
        paths, bounds = (data.data_path,) * len(SPLITS), parse_split(data.split)
    elif any(paths):
        refuse_split(data.split)
        bounds = [(0.0, 1.0) if path else None for path in paths]
    else:
        raise InputError(
            "no data for the tokenizer that was named: give --data-path, --train-data-path or "
            "--mock-data (the default text has a tokenizer of its own)"
        )
    return tuple(
        builder.build(path, portion, size) if portion else None
        for path, portion, size in zip(paths, map(_portion, SPLITS, bounds), sizes, strict=True)
    )


class _Portion(NamedTuple):
    """One split: its name, and where it begins and ends as fractions of each dataset."""

    split: str
    bounds: tuple[float, float]


class _Builder:
    """Builds the datasets of all splits; a file that several of them use is opened once."""

    def __init__(self, spec: SampleSpec, split_text: str | None) -> None:
        self.spec, self.split_text = spec, split_text
        self.sources: dict[str, IndexedDataset] = {}

    def build(
        self, paths: tuple[str, ...], portion: _Portion, size: int | None
    ) -> "GPTDataset | BlendedDataset | None":
        """One split's data; None if no sample is asked for and none can be made."""
        prefixes, weights = parse_blend(paths)
        # With one blend per split the weight of a single prefix says nothing (as megatron-core).
        if len(prefixes) == 1 and (weights is None or self.split_text is None):
            sequences = self._sequences(prefixes[0], portion)
            if not size and self._tokens(prefixes[0], sequences) <= self.spec.seq_length:
                return None
            dataset = self._single(prefixes[0], portion, size)
        elif size == 0:
            return None
        elif weights is None:
            dataset = self._unweighted(prefixes, portion, size)
        else:
            dataset = self._weighted(prefixes, weights, portion, size)
        logger.info(
            "%s: %d samples of %d tokens from %s",
            portion.split,
            len(dataset),
            self.spec.seq_length,
            ", ".join(prefixes),
        )
        return dataset

    def _unweighted(
        self, prefixes: list[str], portion: _Portion, size: int | None
    ) -> BlendedDataset:
        """One epoch of every dataset, blended by length."""
        datasets = [self._single(prefix, portion, None) for prefix in prefixes]
        lengths = [len(dataset) for dataset in datasets]
        size = None if size is None else min(size, sum(lengths))
        index = self.spec.cache.blend_index(lengths, size, prefixes[0], portion.split)
        return BlendedDataset(datasets, index)

    def _weighted(
        self, prefixes: list[str], weights: list[float], portion: _Portion, size: int | None
    ) -> BlendedDataset:
        if size is None:
            raise InputError(
                f"{portion.split}: datasets with weights need a number of samples; give it, or "
                f"leave the weights of {', '.join(prefixes)} out to take every sample once"
            )
        shares = [math.ceil(size * weight) for weight in weights]
        index = self.spec.cache.blend_index(weights, sum(shares), prefixes[0], portion.split)
        taken = times_taken(index[0], len(prefixes))
        datasets = []
        for prefix, share, count in zip(prefixes, shares, taken, strict=True):
            dataset = self._single(prefix, portion, math.ceil(share * (1 + SURPLUS)))
            # Where the surplus is too small megatron-core gives up; here the dataset gets longer.
            if len(dataset) < count:
                dataset = self._single(prefix, portion, count)
            datasets.append(dataset)
        return BlendedDataset(datasets, index)

    def _single(self, prefix: str, portion: _Portion, size: int | None) -> GPTDataset:
        """The samples of one prefix; `size` None: one epoch."""
        sequences, needed = self._sequences(prefix, portion), self.spec.seq_length + 1
        tokens, total = self._tokens(prefix, sequences), len(self.sources[prefix])
        if not tokens and self.split_text is not None:
            raise InputError(
                f"--split {self.split_text!r} leaves no document for {portion.split} of the "
                f"{total} in {prefix}: give {portion.split} a larger weight, or 0"
            )
        if size is None and tokens < needed:
            raise InputError(
                f"{prefix} has {tokens} tokens for {portion.split}, fewer than one sample of "
                f"--seq-length {self.spec.seq_length} + 1: give more text or a shorter length"
            )
        if tokens < needed:
            logger.warning(
                "%s: the %d tokens of %s are fewer than one sample of %d; they are repeated in it",
                *(portion.split, tokens, prefix, needed),
            )
        return GPTDataset(self.sources[prefix], sequences, portion.split, size, self.spec)

    def _sequences(self, prefix: str, portion: _Portion) -> range:
        if prefix not in self.sources:
            self.sources[prefix] = IndexedDataset(prefix)
        return sequence_range(portion.bounds, len(self.sources[prefix]))

    def _tokens(self, prefix: str, sequences: range) -> int:
        lengths = self.sources[prefix].lengths[sequences.start : sequences.stop]
        return int(np.sum(lengths, dtype=np.int64))


def refuse_split(text: str) -> None:
    if text != DataConfig().split:
        raise InputError(
            f"--split {text!r} divides --data-path; --train-data-path, --valid-data-path and "
            "--test-data-path are taken whole: leave --split out"
        )


def _portion(split: str, bounds: tuple[float, float] | None) -> _Portion | None:
    return None if bounds is None else _Portion(split, bounds)
