"""The three arrays that turn documents into shuffled samples, as megatron-core 0.19.2 builds them.

Documents of E epochs are shuffled and laid end to end; sample k is the S + 1 tokens from k * S on,
so that neighbours share one token. Whole epochs are used, so there are at least as many samples as
asked for. If the last epoch is needed for less than 0.8 of its samples, it is shuffled apart, so
that no document is seen twice before all were seen equally often.
"""

from dataclasses import dataclass

import numpy as np

from megatron_zpp.data.compiled_index import MAX_SHUFFLED, native

LAST_EPOCH_SHARE = 0.80


@dataclass(frozen=True, kw_only=True)
class SampleRequest:
    """All that the arrays depend on besides the lengths of the sequences."""

    sequences: range
    seq_length: int
    num_samples: int | None  # None: one epoch
    seed: int

    def tokens(self, lengths: np.ndarray) -> int:
        """Tokens of one epoch, for `lengths` int32 [all sequences of the dataset]."""
        return int(np.sum(lengths[self.sequences.start : self.sequences.stop], dtype=np.int64))


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
    tokens = request.tokens(lengths)
    epochs = plan_epochs(tokens, request.seq_length, request.num_samples)
    random = np.random.RandomState(request.seed)
    document = _documents(sequences, epochs, random)
    sample = _samples(lengths, document, request.seq_length, epochs.count * tokens)
    shuffle = _shuffle(len(sample) - 1, epochs, random)
    return SampleIndex(document=document, sample=sample, shuffle=shuffle)


def _documents(sequences: np.ndarray, epochs: Epochs, random: np.random.RandomState) -> np.ndarray:
    """Sequence numbers of all epochs, shuffled; int32."""
    document = np.tile(sequences, epochs.count)
    if epochs.samples_before_last is None:
        _shuffled(document, random)
    else:
        _shuffled(document[: -len(sequences)], random)
        _shuffled(document[-len(sequences) :], random)
    return document


def _samples(lengths: np.ndarray, document: np.ndarray, seq_length: int, tokens: int) -> np.ndarray:
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
