"""Tokenize the documents of a chunk, in a worker process.

The ids of the faster library (`--bpe-library fastokens`) are compared with those of tiktoken: on
many texts of the first chunk, then on a few texts of every `COMPARE_INTERVAL`-th chunk.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_zpp.data.indexed_dataset import token_dtype
from megatron_zpp.preprocess.chunks import Chunk
from megatron_zpp.preprocess.documents import BLANK, Document, parse_documents
from megatron_zpp.preprocess.preprocess_config import PreprocessConfig
from megatron_zpp.preprocess.sentences import split_sentences
from megatron_zpp.settings.config import TokenizerConfig
from megatron_zpp.tokenizer import Tokenizer, build_tokenizer
from megatron_zpp.tokenizer.fast_gpt2 import FASTOKENS, FastGPT2
from zeropp.errors import InputError

COMPARE_INTERVAL = 16  # chunks
FIRST_SAMPLES = 128  # texts of the first chunk that are compared
SAMPLES = 8  # texts of a later chunk that are compared
SAMPLE_CHARACTERS = 2048  # of each compared text


@dataclass(frozen=True, kw_only=True)
class EncodedTexts:
    """The texts of one key: `ids` of all documents, concatenated; `lengths` int32, the tokens of
    each sequence; `sequences` int32, the number of sequences of each document."""

    ids: np.ndarray
    lengths: np.ndarray
    sequences: np.ndarray


@dataclass(frozen=True, kw_only=True)
class EncodedChunk:
    """A tokenized chunk, with one `EncodedTexts` for each key, and the counts of skipped lines."""

    datasets: tuple[EncodedTexts, ...]
    num_blank: int
    num_invalid: int
    first_invalid: str


@functools.cache
def cached_tokenizer(config: TokenizerConfig) -> Tokenizer:
    """Return the tokenizer, built once in each process; a forked worker inherits it."""
    return build_tokenizer(config)


def load_tokenizers(config: PreprocessConfig, tokenizer_config: TokenizerConfig) -> None:
    """Build the tokenizers that `encode_chunk` uses, so that forked workers inherit them."""
    cached_tokenizer(tokenizer_config)
    if config.bpe_library == FASTOKENS:
        _fast_tokenizer(tokenizer_config)


def encode_chunk(
    config: PreprocessConfig, tokenizer_config: TokenizerConfig, number: int, chunk: Chunk
) -> EncodedChunk:
    """Tokenize the documents of chunk `number`.

    Raises InputError for an invalid document, unless `config.skip_invalid`.
    """
    documents, num_blank, errors = [], 0, []
    for document in parse_documents(chunk, config.keys):
        if document is BLANK:
            num_blank += 1
        elif isinstance(document, InputError):
            errors.append(document)
        else:
            documents.append(document)
    _raise_unless_skipped(errors, config)
    try:
        datasets = _encode_documents(config, tokenizer_config, number, documents)
    except _LibraryMismatchError:
        raise
    except InputError:
        documents, tokenizer_errors = _separate_invalid(tokenizer_config, documents)
        _raise_unless_skipped(tokenizer_errors, config)
        errors += tokenizer_errors
        datasets = _encode_documents(config, tokenizer_config, number, documents)
    return EncodedChunk(
        datasets=datasets,
        num_blank=num_blank,
        num_invalid=len(errors),
        first_invalid=str(errors[0]) if errors else "",
    )


class _LibraryMismatchError(InputError):
    """The faster library returns other ids than tiktoken; no document is to blame."""


def _raise_unless_skipped(errors: Sequence[InputError], config: PreprocessConfig) -> None:
    if errors and not config.skip_invalid:
        raise errors[0]


def _separate_invalid(
    tokenizer_config: TokenizerConfig, documents: Sequence[Document]
) -> tuple[list[Document], list[InputError]]:
    """Return the documents that the tokenizer accepts, and the errors of the others."""
    tokenizer, valid, errors = cached_tokenizer(tokenizer_config), [], []
    for document in documents:
        try:
            for texts in document.texts:
                _check_range(tokenizer.encode_flat(texts)[0], tokenizer)
            valid.append(document)
        except InputError as error:
            errors.append(InputError(f"{document.location}: {error}"))
    return valid, errors


def _encode_documents(
    config: PreprocessConfig,
    tokenizer_config: TokenizerConfig,
    number: int,
    documents: Sequence[Document],
) -> tuple[EncodedTexts, ...]:
    return tuple(
        _encode_key(config, tokenizer_config, number, documents, key_index)
        for key_index in range(len(config.keys))
    )


def _encode_key(
    config: PreprocessConfig,
    tokenizer_config: TokenizerConfig,
    number: int,
    documents: Sequence[Document],
    key_index: int,
) -> EncodedTexts:
    """Tokenize the texts of one key."""
    tokenizer = cached_tokenizer(tokenizer_config)
    texts_by_document = [document.texts[key_index] for document in documents]
    if config.split_sentences:
        texts_by_document = [_sentences(texts, config.keep_newlines) for texts in texts_by_document]
    texts = [text for document_texts in texts_by_document for text in document_texts]
    if config.bpe_library == FASTOKENS:
        location = documents[0].location if documents else ""
        _compare_libraries(tokenizer_config, number, texts, location)
        ids, counts = _fast_tokenizer(tokenizer_config).encode_flat(texts)
    else:
        ids, counts = tokenizer.encode_flat(texts)
    _check_range(ids, tokenizer)
    num_documents = len(documents)
    texts_per_document = np.array([len(texts) for texts in texts_by_document], dtype=int)
    document_of_text = np.repeat(np.arange(num_documents), texts_per_document)
    sequences = np.bincount(document_of_text[counts > 0], minlength=num_documents)
    lengths = counts[counts > 0]
    ids = ids.astype(token_dtype(tokenizer.vocab_size), copy=False)
    if config.append_eod and len(lengths):
        last_sequences = np.cumsum(sequences)[sequences > 0] - 1
        ids = np.insert(ids, np.cumsum(lengths)[last_sequences], tokenizer.eod)
        lengths[last_sequences] += 1
    return EncodedTexts(
        ids=ids,
        lengths=lengths.astype(np.int32),
        sequences=sequences.astype(np.int32),
    )


def _sentences(texts: Sequence[str], keep_newlines: bool) -> list[str]:
    return [sentence for text in texts for sentence in split_sentences(text, keep_newlines)]


def _check_range(ids: np.ndarray, tokenizer: Tokenizer) -> None:
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < tokenizer.vocab_size:
        raise InputError(
            f"a token id outside the vocabulary's {tokenizer.vocab_size} entries: {int(ids.max())}"
        )


def _compare_libraries(
    tokenizer_config: TokenizerConfig, number: int, texts: Sequence[str], location: str
) -> None:
    """Raise InputError if the libraries return different ids for a sample of the texts."""
    if number % COMPARE_INTERVAL:
        return
    step = max(1, len(texts) // (SAMPLES if number else FIRST_SAMPLES))
    sample = [text[:SAMPLE_CHARACTERS] for text in texts[::step]]
    expected_ids, expected_counts = cached_tokenizer(tokenizer_config).encode_flat(sample)
    ids, counts = _fast_tokenizer(tokenizer_config).encode_flat(sample)
    if not (np.array_equal(expected_ids, ids) and np.array_equal(expected_counts, counts)):
        raise _LibraryMismatchError(
            f"{location} and what follows: {FASTOKENS} makes other ids of it than tiktoken; leave "
            f"out --bpe-library {FASTOKENS}"
        )


@functools.cache
def _fast_tokenizer(config: TokenizerConfig) -> FastGPT2:
    return FastGPT2(config.vocab_file, config.merge_file)
