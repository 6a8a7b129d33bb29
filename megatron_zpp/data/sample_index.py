"""The three arrays that map samples to shuffled documents, as megatron-core 0.19.2 builds them.

The documents of E epochs are shuffled and concatenated; sample k is the S + 1 tokens from k * S on,
so that neighbouring samples share one token. Whole epochs are used, so that there are at least as
many samples as requested. If less than 0.8 of the samples of the last epoch are needed, that epoch
is shuffled separately, so that no document is seen again before all have been seen equally often.
"""

from dataclasses import dataclass

import numpy as np

from megatron_zpp.data.native_index import MAX_SHUFFLED, native_index

LAST_EPOCH_SHARE = 0.80


@dataclass(frozen=True, kw_only=True)
class SampleRequest:
    """Everything that the arrays depend on, except the lengths of the sequences."""

    sequences: range
    seq_length: int
    num_samples: int | None  # None: one epoch
    seed: int

    def num_tokens(self, lengths: np.ndarray) -> int:
        """Return the tokens of one epoch, for `lengths` int32 [all sequences of the dataset]."""
        return int(np.sum(lengths[self.sequences.start : self.sequences.stop], dtype=np.int64))


@dataclass(frozen=True, kw_only=True)
class SampleIndex:
    """The arrays that map samples to tokens.

    document: int32 [E * docs], the sequence numbers of all epochs, shuffled. sample: [n + 1, 2],
    the start of each sample as an index of `document` and a token in that sequence. shuffle: [n],
    the order of the samples.
    """

    document: np.ndarray
    sample: np.ndarray
    shuffle: np.ndarray


@dataclass(frozen=True, kw_only=True)
class Epochs:
    """The number of epochs, and if the last one is shuffled separately, the samples before it."""

    count: int
    samples_before_last: int | None  # None: all epochs are shuffled together


def plan_epochs(num_tokens: int, seq_length: int, num_samples: int | None) -> Epochs:
    """Return the fewest epochs of `num_tokens` tokens that have `num_samples` samples."""
    assert num_tokens > 0
    if num_samples is None:
        return Epochs(count=1, samples_before_last=None)
    needed_tokens = num_samples * seq_length + 1
    count = max(1, -(-needed_tokens // num_tokens))  # rounded up, in integers of any size
    if count == 1:
        return Epochs(count=1, samples_before_last=None)
    samples_before_last = ((count - 1) * num_tokens - 1) // seq_length
    samples_per_epoch = (num_tokens - 1) // seq_length
    samples_of_last = num_samples - samples_before_last
    if samples_of_last < int(LAST_EPOCH_SHARE * samples_per_epoch):
        return Epochs(count=count, samples_before_last=samples_before_last)
    return Epochs(count=count, samples_before_last=None)


def build_sample_index(lengths: np.ndarray, request: SampleRequest) -> SampleIndex:
    """Return the three arrays for sequences of `lengths` int32 [all sequences of the dataset]."""
    sequences = np.arange(request.sequences.start, request.sequences.stop, dtype=np.int32)
    num_tokens = request.num_tokens(lengths)
    epochs = plan_epochs(num_tokens, request.seq_length, request.num_samples)
    random = np.random.RandomState(request.seed)
    document = _document_array(sequences, epochs, random)
    sample = _sample_array(lengths, document, request.seq_length, epochs.count * num_tokens)
    shuffle = _shuffle_array(len(sample) - 1, epochs, random)
    return SampleIndex(document=document, sample=sample, shuffle=shuffle)


def sample_starts(
    lengths: np.ndarray, document: np.ndarray, seq_length: int, out: np.ndarray
) -> None:
    """Fill `out` [n + 1, 2] as `NativeIndex.sample_starts`, in NumPy.

    Row k is the place of token k * seq_length in the concatenated sequences of `document`.
    """
    document_lengths = lengths[document]
    document_ends = np.cumsum(document_lengths, dtype=np.int64)
    tokens = np.arange(1, len(out)) * seq_length
    entries = np.searchsorted(document_ends, tokens, side="right")
    out[0] = 0
    out[1:, 0] = entries
    out[1:, 1] = tokens - document_ends[entries] + document_lengths[entries]


def _document_array(
    sequences: np.ndarray, epochs: Epochs, random: np.random.RandomState
) -> np.ndarray:
    """Return the sequence numbers of all epochs, shuffled; int32."""
    document = np.tile(sequences, epochs.count)
    if epochs.samples_before_last is None:
        _shuffle_in_place(document, random)
    else:
        _shuffle_in_place(document[: -len(sequences)], random)
        _shuffle_in_place(document[-len(sequences) :], random)
    return document


def _sample_array(
    lengths: np.ndarray, document: np.ndarray, seq_length: int, num_tokens: int
) -> np.ndarray:
    """Return the start of each sample [n + 1, 2] in the `num_tokens` tokens of `document`.

    The first row is 0, 0 as in megatron-core, even if the first documents are empty.
    """
    num_samples = (num_tokens - 1) // seq_length
    largest = max(len(document), int(lengths.max()))
    dtype = np.int32 if largest <= np.iinfo(np.int32).max else np.int64
    sample = np.zeros((num_samples + 1, 2), dtype=dtype)
    native = native_index()
    fill = native.sample_starts if native else sample_starts
    fill(lengths, document, seq_length, sample)
    return sample


def _shuffle_array(num_samples: int, epochs: Epochs, random: np.random.RandomState) -> np.ndarray:
    """Return the order of the samples; a separate last epoch remains last."""
    dtype = np.uint32 if num_samples < np.iinfo(np.uint32).max - 1 else np.int64
    shuffle = np.arange(num_samples, dtype=dtype)
    boundary = epochs.samples_before_last
    if boundary is None:
        boundary = num_samples
    _shuffle_in_place(shuffle[:boundary], random)
    _shuffle_in_place(shuffle[boundary:], random)
    return shuffle


def _shuffle_in_place(array: np.ndarray, random: np.random.RandomState) -> None:
    """Call `random.shuffle(array)`, or its compiled equivalent."""
    native = native_index()
    if native and array.itemsize == 4 and len(array) <= MAX_SHUFFLED:
        native.shuffle(array, random)
    else:
        random.shuffle(array)
