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


@dataclass(frozen=True, kw_only=True)
class ChunkEncoder:
    """Tokenizes chunks, in this process or in workers, which are sent the settings alone."""

    config: PreprocessConfig
    tokenizer_config: TokenizerConfig

    @property
    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer, built once in each process; a forked worker inherits it."""
        return _tokenizer(self.tokenizer_config)

    @property
    def fast_tokenizer(self) -> FastGPT2 | None:
        """Return that of the faster library, if it is used; it is built and inherited likewise."""
        is_used = self.config.bpe_library == FASTOKENS
        return _fast_tokenizer(self.tokenizer_config) if is_used else None

    def __call__(self, number: int, chunk: Chunk) -> EncodedChunk:
        """Tokenize the documents of chunk `number`.

        Raises InputError for an invalid document, unless `config.skip_invalid`.
        """
        documents, num_blank, errors = [], 0, []
        for document in parse_documents(chunk, self.config.keys):
            if document is BLANK:
                num_blank += 1
            elif isinstance(document, InputError):
                errors.append(document)
            else:
                documents.append(document)
        self._raise_unless_skipped(errors)
        try:
            datasets = self._encode(number, documents)
        except _LibraryMismatchError:
            raise
        except InputError:
            documents, tokenizer_errors = self._separate_invalid(documents)
            self._raise_unless_skipped(tokenizer_errors)
            errors += tokenizer_errors
            datasets = self._encode(number, documents)
        return EncodedChunk(
            datasets=datasets,
            num_blank=num_blank,
            num_invalid=len(errors),
            first_invalid=str(errors[0]) if errors else "",
        )

    def _raise_unless_skipped(self, errors: Sequence[InputError]) -> None:
        if errors and not self.config.skip_invalid:
            raise errors[0]

    def _separate_invalid(
        self, documents: Sequence[Document]
    ) -> tuple[list[Document], list[InputError]]:
        """Return the documents that the tokenizer accepts, and the errors of the others."""
        valid, errors = [], []
        for document in documents:
            try:
                for texts in document.texts:
                    _check_range(self.tokenizer.encode_flat(texts)[0], self.tokenizer)
                valid.append(document)
            except InputError as error:
                errors.append(InputError(f"{document.location}: {error}"))
        return valid, errors

    def _encode(self, number: int, documents: Sequence[Document]) -> tuple[EncodedTexts, ...]:
        location = documents[0].location if documents else ""
        return tuple(
            self._encode_key(number, [document.texts[key] for document in documents], location)
            for key in range(len(self.config.keys))
        )

    def _encode_key(
        self, number: int, texts_by_document: list[list[str]], location: str
    ) -> EncodedTexts:
        """Tokenize the texts of one key; the first document is at `location`."""
        config, tokenizer, num_documents = self.config, self.tokenizer, len(texts_by_document)
        if config.split_sentences:
            texts_by_document = [
                [each for text in texts for each in split_sentences(text, config.keep_newlines)]
                for texts in texts_by_document
            ]
        texts = [text for document_texts in texts_by_document for text in document_texts]
        self._compare_libraries(number, texts, location)
        ids, counts = (self.fast_tokenizer or tokenizer).encode_flat(texts)
        _check_range(ids, tokenizer)
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
            ids=ids, lengths=lengths.astype(np.int32), sequences=sequences.astype(np.int32)
        )

    def _compare_libraries(self, number: int, texts: Sequence[str], location: str) -> None:
        """Raise InputError if the libraries return different ids for a sample of the texts."""
        if self.fast_tokenizer is None or number % COMPARE_INTERVAL:
            return
        step = max(1, len(texts) // (SAMPLES if number else FIRST_SAMPLES))
        sample = [text[:SAMPLE_CHARACTERS] for text in texts[::step]]
        pairs = zip(
            self.tokenizer.encode_flat(sample), self.fast_tokenizer.encode_flat(sample), strict=True
        )
        if not all(np.array_equal(expected, found) for expected, found in pairs):
            raise _LibraryMismatchError(
                f"{location} and what follows: {FASTOKENS} makes other ids of it than tiktoken; "
                f"leave out --bpe-library {FASTOKENS}"
            )


class _LibraryMismatchError(InputError):
    """The faster library returns other ids than tiktoken; no document is to blame."""


@functools.cache
def _tokenizer(config: TokenizerConfig) -> Tokenizer:
    return build_tokenizer(config)


@functools.cache
def _fast_tokenizer(config: TokenizerConfig) -> FastGPT2:
    return FastGPT2(config.vocab_file, config.merge_file)


def _check_range(ids: np.ndarray, tokenizer: Tokenizer) -> None:
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < tokenizer.vocab_size:
        raise InputError(
            f"a token id outside the vocabulary's {tokenizer.vocab_size} entries: {int(ids.max())}"
        )
