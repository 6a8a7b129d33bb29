"""Samples of S + 1 tokens for training, validation and test, the same as megatron-core 0.19.2's.

`build_datasets` opens the files, divides their sequences by `--split` (or uses one blend for each
split), and blends. Every rank calls it; the index arrays are cached on disk, and built once for all
processes that share the folder.
"""

import errno
import logging
import math
import resource
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from megatron_zpp.data.blend import BlendedDataset, count_samples, parse_blend
from megatron_zpp.data.index_cache import IndexCache
from megatron_zpp.data.indexed_dataset import IndexedDataset, id_outside
from megatron_zpp.data.sample_index import SampleIndex, SampleRequest
from megatron_zpp.data.split import SPLITS, parse_split, sequence_range
from megatron_zpp.settings.config import DataConfig
from zeropp.errors import InputError

OTHER_FILES = 256  # of everything but datasets, such as pipes of data workers
SURPLUS = 0.005  # fraction by which a dataset exceeds its share of a blend, as in megatron-core

logger = logging.getLogger("megatron_zpp")


@dataclass(frozen=True, kw_only=True)
class SampleSpec:
    """The settings that all datasets of a run share."""

    seq_length: int
    seed: int
    vocab_size: int
    cache: IndexCache


class GPTDataset:
    """At least `sizes[-1]` shuffled samples (None: those of one epoch) of a range of sequences.

    `sizes`: what the run and those that it resumes asked for, the first one first. Each that needs
    more samples gets further epochs behind those that are there, which keep their order.

    The range must contain at least one token. Raises InputError for tokens that are not integers.
    """

    def __init__(
        self,
        source: IndexedDataset,
        sequences: range,
        split: str,
        sizes: Sequence[int | None],
        spec: SampleSpec,
    ) -> None:
        if source.dtype.kind == "f":
            raise InputError(
                f"{source.idx_path} gives its tokens the type {source.dtype.name}: token ids are "
                "whole numbers; preprocess the text again"
            )
        self.source, self.spec = source, spec
        self.indices: list[SampleIndex] = []
        for size in sizes:
            if self.indices and size <= len(self):
                continue
            request = SampleRequest(
                sequences=sequences,
                seq_length=spec.seq_length,
                num_samples=size and size - len(self),
                seed=spec.seed + len(self.indices),
            )
            index = spec.cache.sample_index(source.lengths, request, source.prefix, split)
            self.indices.append(index)
        self._epoch_tokens = request.num_tokens(source.lengths)

    def __len__(self) -> int:
        return sum(len(index.shuffle) for index in self.indices)

    def epochs(self, num_samples: float) -> tuple[float, ...]:
        """How often `num_samples` samples go through the text."""
        return (num_samples * self.spec.seq_length / self._epoch_tokens,)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        """Return sample `index`: dict(tokens int64 [S + 1]).

        Raises InputError for a token id outside the vocabulary.
        """
        parts = [self.source.get(*span) for span in self.spans(index)]
        tokens = np.concatenate(parts, dtype=np.int64)
        self._check_vocabulary(tokens)
        return {"tokens": tokens}

    def spans(self, index: int) -> list[tuple[int, int, int]]:
        """Return the sequence, offset and length of each part of sample `index`, in order."""
        for part in self.indices:
            if index < len(part.shuffle):
                break
            index -= len(part.shuffle)
        row = int(part.shuffle[index])
        (first, offset), (last, end) = part.sample[row : row + 2].tolist()
        sequences = part.document[first : last + 1].tolist()
        if first == last:
            return [(sequences[0], offset, end + 1 - offset)]
        spans = []
        for sequence in sequences[:-1]:
            spans.append((sequence, offset, int(self.source.lengths[sequence]) - offset))
            offset = 0
        return [*spans, (sequences[-1], 0, end + 1)]

    def _check_vocabulary(self, tokens: np.ndarray) -> None:
        # Not checked once for the whole file, so that a file of terabytes is not read twice.
        vocab_size = self.spec.vocab_size
        if (invalid := id_outside(tokens, vocab_size)) is not None:
            raise InputError(
                f"{self.source.bin_path} holds token id {invalid}, but the tokenizer's vocabulary "
                f"has {vocab_size} entries (ids 0 to {vocab_size - 1}): preprocess the text with "
                "this tokenizer, or give the tokenizer that wrote it"
            )


def build_datasets(
    data: DataConfig,
    seq_length: int,
    sizes: tuple[int | None, int | None, int | None],
    seed: int,
    vocab_size: int,
    *,
    earlier: Sequence[Sequence[int]] = (),
    cache_required: bool = True,
) -> "tuple[GPTDataset | BlendedDataset | MockDataset | None, ...]":
    """Return training, validation and test data of at least `sizes` samples.

    A split without data is None. A size of None means every sample of one epoch once; prefixes
    without weights never give more than that. `earlier`: the sizes that the runs asked for which
    this one resumes; their samples keep their order. Raises InputError for missing, damaged or
    insufficient data, for weights without a size, and if the indices cannot be cached (a warning if
    not `cache_required`).
    """
    if data.mock_data:
        return tuple(
            MockDataset(size, seq_length, vocab_size, (seed, split_number)) if size else None
            for split_number, size in enumerate(sizes)
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
        paths = (data.data_path,) * len(SPLITS)
        bounds = [share and (share,) for share in parse_split(data.split)]
    elif any(paths):
        refuse_split(data.split)
        bounds = [each if path else None for path, each in zip(paths, data.ranges, strict=True)]
    else:
        raise InputError(
            "no data for the tokenizer that was named: give --data-path, --train-data-path or "
            "--mock-data (the default text has a tokenizer of its own)"
        )
    datasets = []
    all_sizes = list(zip(*earlier, sizes, strict=True))
    if data.dataloader_type == "cyclic":  # the first samples are repeated as long as it takes
        all_sizes = [split_sizes[:1] for split_sizes in all_sizes]
    num_files = (2 + 3 * len(all_sizes[0])) * sum(len(names or ()) for names in paths)
    with _open_files(num_files + OTHER_FILES):
        for split, *arguments in zip(SPLITS, paths, bounds, all_sizes, strict=True):
            datasets.append(builder.build(split, *arguments))
    return tuple(datasets)


@contextmanager
def _open_files(most: int) -> Iterator[None]:
    """Let this process keep `most` files open; InputError if its limit is met before."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, hard), hard))
    try:
        yield
    except OSError as error:
        if error.errno != errno.EMFILE:
            raise
        raise InputError(
            f"too many open files: a process may have {hard}, and these datasets need up to {most} "
            f"mapped: raise the limit (ulimit -Hn {most}), or merge datasets"
        ) from error


class MockDataset:
    """`size` samples of random token ids below `vocab_size`, for benchmarks.

    A sample depends on `seed`, which includes the split, and on its index only.
    """

    def __init__(self, size: int, seq_length: int, vocab_size: int, seed: tuple[int, ...]) -> None:
        self.size, self.seq_length, self.vocab_size = size, seq_length, vocab_size
        self.seed = seed

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        """Return sample `index`: dict(tokens int64 [S + 1])."""
        random = np.random.default_rng((*self.seed, index))
        return {"tokens": random.integers(self.vocab_size, size=self.seq_length + 1)}


class _Part(NamedTuple):
    """What a split takes of a dataset: the sequences between two shares."""

    split: str
    prefix: str
    low: float
    high: float


class _Builder:
    """Builds the datasets of all splits, and opens each file once."""

    def __init__(self, spec: SampleSpec, split_text: str | None) -> None:
        self.spec, self.split_text = spec, split_text
        self.sources: dict[str, IndexedDataset] = {}

    def build(
        self,
        name: str,
        paths: tuple[str, ...],
        bounds: Sequence[tuple[float, float]] | None,
        sizes: Sequence[int | None],
    ) -> "GPTDataset | BlendedDataset | None":
        """Return the data of a split; None if no sample is requested and none can be made.

        `bounds`: of all datasets, or of each; None for a split without data.
        """
        if bounds is None:
            return None
        prefixes, weights = parse_blend(paths)
        size = None if None in sizes else max(sizes)
        if len(bounds) == 1:
            bounds = [*bounds] * len(prefixes)
        if len(bounds) != len(prefixes):
            raise InputError(
                f"--split-ranges: {len(bounds)} ranges for the {len(prefixes)} datasets of {name}: "
                "give one for all, or one for each"
            )
        parts = [
            _Part(name, prefix, *share) for prefix, share in zip(prefixes, bounds, strict=True)
        ]
        # With one blend per split the weight of a single prefix is ignored, as in megatron-core.
        if len(parts) == 1 and (weights is None or self.split_text is None):
            sequences = self._sequences(parts[0])
            if not size and self._num_tokens(prefixes[0], sequences) <= self.spec.seq_length:
                return None
            dataset = self._single(parts[0], sizes)
        elif size == 0:
            return None
        elif weights is None:
            dataset = self._unweighted(parts, size)
        else:
            dataset = self._weighted(parts, weights, sizes)
        # With `--split` all splits are of the same files, which the start-up table names.
        source = f" from {', '.join(prefixes)}" if self.split_text is None else ""
        shape = len(dataset), self.spec.seq_length
        logger.info("%s: %d samples of %d tokens%s", name, *shape, source)
        return dataset

    def _unweighted(self, parts: list[_Part], size: int | None) -> BlendedDataset:
        """Return one epoch of every dataset, blended in proportion to their lengths."""
        datasets = [self._single(part, [None]) for part in parts]
        lengths = [len(dataset) for dataset in datasets]
        size = None if size is None else min(size, sum(lengths))
        index = self.spec.cache.blend_index(lengths, size, parts[0].prefix, parts[0].split)
        return BlendedDataset(datasets, index)

    def _weighted(
        self, parts: list[_Part], weights: list[float], sizes: Sequence[int | None]
    ) -> BlendedDataset:
        first = parts[0]
        if None in sizes:
            raise InputError(
                f"{first.split}: datasets with weights need a number of samples; give it, or leave "
                f"the weights of {', '.join(part.prefix for part in parts)} out to take every "
                "sample once"
            )
        total = sum(math.ceil(max(sizes) * weight) for weight in weights)
        index = self.spec.cache.blend_index(weights, total, first.prefix, first.split)
        part_sizes: list[list[int]] = [[] for _ in parts]
        for size in sizes:
            shares = [math.ceil(size * weight) for weight in weights]
            counts = count_samples(index[0][: sum(shares)], len(parts))
            datasets = []
            for part, share, count, asked in zip(parts, shares, counts, part_sizes, strict=True):
                asked.append(math.ceil(share * (1 + SURPLUS)))
                # If the surplus is too small, megatron-core fails; here the dataset is extended.
                if len(self._single(part, asked)) < count:
                    asked[-1] = count
                datasets.append(self._single(part, asked))
        return BlendedDataset(datasets, index)

    def _single(self, part: _Part, sizes: Sequence[int | None]) -> GPTDataset:
        """Return the samples of one prefix; a size of None means one epoch."""
        split, prefix, low, high = part
        sequences, sample_tokens = self._sequences(part), self.spec.seq_length + 1
        num_tokens = self._num_tokens(prefix, sequences)
        if not num_tokens and self.split_text is not None:
            raise InputError(
                f"--split {self.split_text!r} leaves no document for {split} of the "
                f"{len(self.sources[prefix])} in {prefix}: give {split} a larger weight, or 0"
            )
        if not num_tokens and (low, high) != (0.0, 1.0):
            raise InputError(
                f"{split}: no document of the {len(self.sources[prefix])} in {prefix} is "
                f"between the shares {low:g} and {high:g}: give a larger range"
            )
        if None in sizes and num_tokens < sample_tokens:
            raise InputError(
                f"{prefix} has {num_tokens} tokens for {split}, fewer than one sample of "
                f"--seq-length {self.spec.seq_length} + 1: give more text or a shorter length"
            )
        if num_tokens < sample_tokens:
            logger.warning(
                "%s: the %d tokens of %s are fewer than one sample of %d; they are repeated in it",
                *(split, num_tokens, prefix, sample_tokens),
            )
        return GPTDataset(self.sources[prefix], sequences, split, sizes, self.spec)

    def _sequences(self, part: _Part) -> range:
        if part.prefix not in self.sources:
            self.sources[part.prefix] = IndexedDataset(part.prefix)
        return sequence_range((part.low, part.high), len(self.sources[part.prefix]))

    def _num_tokens(self, prefix: str, sequences: range) -> int:
        lengths = self.sources[prefix].lengths[sequences.start : sequences.stop]
        return int(np.sum(lengths, dtype=np.int64))


def refuse_split(text: str) -> None:
    """Raise InputError if --split was set, for data that has one path for each split."""
    if text != DataConfig().split:
        raise InputError(
            f"--split {text!r} divides --data-path; --train-data-path, --valid-data-path and "
            "--test-data-path are taken whole: leave --split out"
        )
