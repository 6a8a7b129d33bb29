"""A chunk of documents as token ids, by one worker.

A faster library is never trusted: the ids it makes of many texts of the first chunk, and after that
of a few in every so many chunks, are compared with tiktoken's.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_zpp.data.indexed_dataset import token_dtype
from megatron_zpp.preprocess.chunks import Chunk
from megatron_zpp.preprocess.documents import Document, documents
from megatron_zpp.preprocess.sentences import sentences
from megatron_zpp.settings.config import TokenizerConfig
from megatron_zpp.tokenizer import Tokenizer, build_tokenizer
from megatron_zpp.tokenizer.fast_gpt2 import NAME, FastGPT2
from zeropp.errors import InputError

COMPARED_EVERY = 16  # chunks
FIRST_SAMPLES, SAMPLES, SAMPLE = 128, 8, 2048  # texts of the first, of others; characters of each


@dataclass(frozen=True, kw_only=True)
class Job:
    """What a worker must know."""

    tokenizer: TokenizerConfig
    library: str
    keys: tuple[str, ...]
    append_eod: bool
    split_sentences: bool
    keep_newlines: bool
    skip_invalid: bool


@dataclass(frozen=True, kw_only=True)
class Encoded:
    """Documents of one key: all ids, tokens of each sequence, sequences of each document."""

    ids: np.ndarray
    lengths: np.ndarray
    sequences: np.ndarray


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a worker made of a chunk, one `Encoded` for each key, and what it left out."""

    datasets: tuple[Encoded, ...]
    num_blank: int
    num_invalid: int
    first_invalid: str


@functools.cache
def tokenizer_of(config: TokenizerConfig) -> Tokenizer:
    """The tokenizer, made once in each process; a forked worker has it from the beginning."""
    return build_tokenizer(config)


def prepare(job: Job) -> None:
    """Make what `encode` needs before workers are forked, who then have it; encodes nothing."""
    tokenizer_of(job.tokenizer)
    if job.library == NAME:
        _fast(job.tokenizer)


def encode(job: Job, number: int, chunk: Chunk) -> Result:
    """Tokenize the documents of chunk `number`; InputError for one that cannot be read."""
    good, blank, invalid = [], 0, []
    for document in documents(chunk, job.keys):
        if document is None:
            blank += 1
        elif isinstance(document, InputError):
            invalid.append(document)
        else:
            good.append(document)
    _refuse(invalid, job)
    try:
        datasets = _datasets(job, number, good)
    except _OtherIds:
        raise
    except InputError:
        good, more = _sorted_out(job, good)
        _refuse(more, job)
        invalid += more
        datasets = _datasets(job, number, good)
    return Result(
        datasets=datasets, num_blank=blank, num_invalid=len(invalid),
        first_invalid=str(invalid[0]) if invalid else "",
    )  # fmt: skip


class _OtherIds(InputError):
    """The faster library makes other ids: no fault of a document."""


def _refuse(invalid: Sequence[InputError], job: Job) -> None:
    if invalid and not job.skip_invalid:
        raise invalid[0]


def _sorted_out(job: Job, found: Sequence[Document]) -> tuple[list[Document], list[InputError]]:
    """The documents that the tokenizer accepts, and what it says of the others."""
    tokenizer, good, bad = tokenizer_of(job.tokenizer), [], []
    for document in found:
        try:
            for texts in document.texts:
                _check_range(tokenizer.encode_flat(texts)[0], tokenizer)
            good.append(document)
        except InputError as error:
            bad.append(InputError(f"{document.where}: {error}"))
    return good, bad


def _datasets(job: Job, number: int, found: Sequence[Document]) -> tuple[Encoded, ...]:
    return tuple(_dataset(job, number, found, place) for place in range(len(job.keys)))


def _dataset(job: Job, number: int, found: Sequence[Document], key: int) -> Encoded:
    """The documents' texts of one key as tokens."""
    tokenizer = tokenizer_of(job.tokenizer)
    parts = [document.texts[key] for document in found]
    if job.split_sentences:
        parts = [[s for text in texts for s in sentences(text, job.keep_newlines)]
                 for texts in parts]  # fmt: skip
    texts = [text for part in parts for text in part]
    if job.library == NAME:
        _compare(job, number, texts, found[0].where if found else "")
        ids, counts = _fast(job.tokenizer).encode_flat(texts)
    else:
        ids, counts = tokenizer.encode_flat(texts)
    _check_range(ids, tokenizer)
    owners = np.repeat(np.arange(len(parts)), np.array([len(part) for part in parts], dtype=int))
    sequences = np.bincount(owners[counts > 0], minlength=len(parts))
    lengths = counts[counts > 0]
    dtype = token_dtype(tokenizer.vocab_size)
    if job.append_eod and len(lengths):
        last = np.cumsum(sequences)[sequences > 0] - 1
        lengths[last] += 1
        ids = _with_ends(ids, np.cumsum(lengths)[last] - 1, tokenizer.eod, dtype)
    return Encoded(
        ids=ids.astype(dtype, copy=False),
        lengths=lengths.astype(np.int32),
        sequences=sequences.astype(np.int32),
    )


def _with_ends(ids: np.ndarray, places: np.ndarray, eod: int, dtype: np.dtype) -> np.ndarray:
    """The ids [n] with `eod` put in, so that it stands at `places` [k] of the result [n + k]."""
    out = np.empty(len(ids) + len(places), dtype=dtype)
    is_text = np.ones(len(out), dtype=bool)
    is_text[places] = False
    out[is_text] = ids
    out[places] = eod
    return out


def _check_range(ids: np.ndarray, tokenizer: Tokenizer) -> None:
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < tokenizer.vocab_size:
        raise InputError(
            f"a token id outside the vocabulary's {tokenizer.vocab_size} entries: {int(ids.max())}"
        )


def _compare(job: Job, number: int, texts: Sequence[str], where: str) -> None:
    """Raise InputError if the faster library's ids of a sample of the texts differ."""
    if number % COMPARED_EVERY:
        return
    step = max(1, len(texts) // (SAMPLES if number else FIRST_SAMPLES))
    sample = [text[:SAMPLE] for text in texts[::step]]
    expected = tokenizer_of(job.tokenizer).encode_flat(sample)
    made = _fast(job.tokenizer).encode_flat(sample)
    if not all(map(np.array_equal, expected, made)):
        raise _OtherIds(
            f"{where} and what follows: {NAME} makes other ids of it than tiktoken; leave out "
            f"--bpe-library {NAME}"
        )


@functools.cache
def _fast(config: TokenizerConfig) -> FastGPT2:
    return FastGPT2(config.vocab_file, config.merge_file)
