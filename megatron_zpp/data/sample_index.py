"""The three arrays that turn documents into shuffled samples, as megatron-core 0.19.2 builds them.

Documents of E epochs are shuffled and laid end to end; sample k is the S + 1 tokens from k * S on,
so that neighbours share one token. Whole epochs are used, so there are at least as many samples as
asked for. If the last epoch is needed for less than 0.8 of its samples, it is shuffled apart, so
that no document is seen twice before all were seen equally often.
"""

import hashlib
import json
import logging
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron_zpp.data.native import MAX_SHUFFLED, native
from zeropp.atomic import write_atomically
from zeropp.errors import InputError

LAST_EPOCH_SHARE = 0.80
PARTS = ("document", "sample", "shuffle")
FORMAT = 1  # of the cache; raised when the same request gives other arrays

logger = logging.getLogger("megatron_zpp")


@dataclass(frozen=True, kw_only=True)
class SampleRequest:
    """All that the arrays depend on besides the lengths of the sequences."""

    sequences: range
    seq_length: int
    num_samples: int | None  # None: one epoch
    seed: int


@dataclass(frozen=True, kw_only=True)
class SampleIndex:
    """`document` int32 [E * docs]; `sample` [n + 1, 2], (entry of it, token); `shuffle` [n]."""

    document: np.ndarray
    sample: np.ndarray
    shuffle: np.ndarray


@dataclass(frozen=True, kw_only=True)
class Epochs:
    """How often the tokens are repeated, and how many samples lie before a last epoch apart."""

    count: int
    samples_before_last: int | None  # None: all epochs are shuffled together


def plan_epochs(tokens: int, seq_length: int, num_samples: int | None) -> Epochs:
    """Fewest epochs of `tokens` with `num_samples` samples, and whether the last stands apart."""
    assert tokens > 0
    if num_samples is None:
        return Epochs(count=1, samples_before_last=None)
    count = max(1, -(-(num_samples * seq_length + 1) // tokens))
    if count == 1:
        return Epochs(count=1, samples_before_last=None)
    before = ((count - 1) * tokens - 1) // seq_length
    per_epoch = (tokens - 1) // seq_length
    apart = num_samples - before < int(LAST_EPOCH_SHARE * per_epoch)
    return Epochs(count=count, samples_before_last=before if apart else None)


def build_sample_index(lengths: np.ndarray, request: SampleRequest) -> SampleIndex:
    """The three arrays for sequences of `lengths` int32 [all sequences of the dataset]."""
    sequences = np.arange(request.sequences.start, request.sequences.stop, dtype=np.int32)
    tokens = int(np.sum(lengths[request.sequences.start : request.sequences.stop], dtype=np.int64))
    epochs = plan_epochs(tokens, request.seq_length, request.num_samples)
    random = np.random.RandomState(request.seed)
    document = _documents(sequences, epochs, random)
    sample = _samples(lengths, document, request.seq_length, epochs.count * tokens)
    shuffle = _shuffle(len(sample) - 1, epochs, random)
    return SampleIndex(document=document, sample=sample, shuffle=shuffle)


def cached_sample_index(
    lengths: np.ndarray, request: SampleRequest, folder: Path, split: str
) -> SampleIndex:
    """As `build_sample_index`, kept in `folder` under a hash of all that determines it.

    Files appear complete or not at all, so ranks that build at the same time do no harm. The
    arrays of a found index are mapped, not read. Raises InputError if `folder` is not writable.
    """
    description = _describe(lengths, request)
    digest = hashlib.md5(description.encode(), usedforsecurity=False).hexdigest()
    paths = [folder / f"{digest}-GPTDataset-{split}-{part}_index.npy" for part in PARTS]
    if all(path.is_file() for path in paths):
        return _load(paths)
    index = build_sample_index(lengths, request)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        text = folder / f"{digest}-GPTDataset-{split}-description.txt"
        write_atomically(text, lambda file: file.write(description.encode()))
        for path, part in zip(paths, PARTS, strict=True):
            array = getattr(index, part)
            write_atomically(path, lambda file, array=array: np.save(file, array))
    except OSError as error:
        raise InputError(
            f"cannot keep the sample index in {folder} ({error.strerror}): "
            "name a folder with room and write access with --data-cache-path"
        ) from error
    return index


def _documents(sequences: np.ndarray, epochs: Epochs, random: np.random.RandomState) -> np.ndarray:
    """Sequence numbers of all epochs, shuffled; int32."""
    document = np.tile(sequences, epochs.count)
    if epochs.samples_before_last is None:
        _shuffled(document, random)
    else:
        _shuffled(document[: -len(sequences)], random)
        _shuffled(document[-len(sequences) :], random)
    return document


def _samples(
    lengths: np.ndarray, document: np.ndarray, seq_length: int, tokens: int
) -> np.ndarray:
    """Where each sample starts [n + 1, 2]: the sequences `document`, `tokens` in all, end to end.

    The first row is 0, 0 as in megatron-core, even if the first documents are empty.
    """
    count = (tokens - 1) // seq_length
    largest = max(len(document), int(lengths.max()))
    kind = np.int32 if largest <= np.iinfo(np.int32).max else np.int64
    sample = np.zeros((count + 1, 2), dtype=kind)
    if native():
        native().starts(lengths, document, seq_length, sample)
    else:
        fill_starts(lengths, document, seq_length, sample)
    return sample


def fill_starts(
    lengths: np.ndarray, document: np.ndarray, seq_length: int, out: np.ndarray
) -> None:
    """As `NativeIndex.starts`, in NumPy."""
    own = lengths[document]
    ends = np.cumsum(own, dtype=np.int64)
    starts = np.arange(1, len(out)) * seq_length
    entry = np.searchsorted(ends, starts, side="right")
    out[0] = 0
    out[1:, 0] = entry
    out[1:, 1] = starts - ends[entry] + own[entry]


def _shuffle(count: int, epochs: Epochs, random: np.random.RandomState) -> np.ndarray:
    kind = np.uint32 if count < np.iinfo(np.uint32).max - 1 else np.int64
    shuffle = np.arange(count, dtype=kind)
    first = count if epochs.samples_before_last is None else epochs.samples_before_last
    _shuffled(shuffle[:first], random)
    _shuffled(shuffle[first:], random)
    return shuffle


def _shuffled(array: np.ndarray, random: np.random.RandomState) -> None:
    """`random.shuffle(array)`."""
    if native() and array.itemsize == 4 and len(array) <= MAX_SHUFFLED:
        native().shuffle(array, random)
    else:
        random.shuffle(array)


def _describe(lengths: np.ndarray, request: SampleRequest) -> str:
    used = np.ascontiguousarray(lengths[request.sequences.start : request.sequences.stop])
    fields = {
        "format": FORMAT,
        "lengths": hashlib.md5(used.tobytes(), usedforsecurity=False).hexdigest(),
        "sequences": [request.sequences.start, request.sequences.stop],
        "seq_length": request.seq_length,
        "num_samples": request.num_samples,
        "seed": request.seed,
    }
    return json.dumps(fields, indent=1)


def _load(paths: list[Path]) -> SampleIndex:
    arrays = []
    for path in paths:
        try:
            arrays.append(np.load(path, mmap_mode="r", allow_pickle=False))
        except (ValueError, OSError) as error:
            raise InputError(
                f"the cached index {path} is damaged ({error}): delete it and start again"
            ) from error
    return SampleIndex(**dict(zip(PARTS, arrays, strict=True)))
