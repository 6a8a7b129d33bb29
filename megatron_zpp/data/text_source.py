"""The text and the tokenizer of a run: those that are configured, or the default corpus."""

import dataclasses
import logging
from pathlib import Path

from megatron_zpp.data.corpus import VOCAB_SIZE, Corpus, load_standard_library
from megatron_zpp.data.path_files import with_named_paths
from megatron_zpp.settings.config import DataConfig, TokenizerConfig
from megatron_zpp.settings.data import names_examples
from megatron_zpp.tokenizer import Tokenizer, build_tokenizer
from zeropp.errors import InputError

DEFAULT_CACHE = ".cache"  # in the current folder
SMALLEST_VOCAB_SIZE = 257  # of the default corpus: the bytes, and end of document

log = logging.getLogger("megatron_zpp")


def resolve_data(data: DataConfig, tokenizer: TokenizerConfig) -> tuple[DataConfig, Tokenizer]:
    """Return the data section with default paths filled in, and the tokenizer.

    Without any path or tokenizer, the text is the default corpus, with a tokenizer trained on it,
    of `vocab_size` entries if that is given; both are built by the first call and cached. For files
    of examples, attention and positions are reset at each example. Raises InputError if files are
    missing or invalid.
    """
    data = with_named_paths(data)
    if names_examples(data) and not (data.reset_attention_mask and data.reset_position_ids):
        data = dataclasses.replace(data, reset_attention_mask=True, reset_position_ids=True)
        log.info("examples: --reset-attention-mask and --reset-position-ids keep them apart")
    if _is_configured(data, tokenizer):
        return data, build_tokenizer(tokenizer)
    corpus = _load_default_corpus(data.data_cache_path, tokenizer)
    has_default_split = data.split == DataConfig().split
    data = dataclasses.replace(
        data,
        data_path=(str(corpus.prefix),),
        split=corpus.split if has_default_split else data.split,
    )
    return data, build_tokenizer(_corpus_tokenizer(corpus, tokenizer))


def resolve_tokenizer(cache: str | None, tokenizer: TokenizerConfig) -> TokenizerConfig:
    """Return `tokenizer`, or if it is not configured, the one of the default corpus in `cache`."""
    if _is_tokenizer_configured(tokenizer):
        return tokenizer
    return _corpus_tokenizer(_load_default_corpus(cache, tokenizer), tokenizer)


def resolve_vocab_size(data: DataConfig, tokenizer: TokenizerConfig) -> int:
    """Return the vocabulary size of the tokenizer of `resolve_data`, without reading any text."""
    if _is_configured(data, tokenizer):
        return build_tokenizer(tokenizer).vocab_size
    return _corpus_vocab_size(tokenizer) + tokenizer.vocab_extra_ids


def _load_default_corpus(cache: str | None, tokenizer: TokenizerConfig) -> Corpus:
    folder = Path(cache or DEFAULT_CACHE) / "standard-library"
    return load_standard_library(folder, vocab_size=_corpus_vocab_size(tokenizer))


def _corpus_vocab_size(tokenizer: TokenizerConfig) -> int:
    size = tokenizer.vocab_size or VOCAB_SIZE
    if size < SMALLEST_VOCAB_SIZE:
        raise InputError(
            f"--vocab-size {size}: a tokenizer of the default corpus has at least "
            f"{SMALLEST_VOCAB_SIZE} entries, the bytes and end of document"
        )
    return size


def _corpus_tokenizer(corpus: Corpus, tokenizer: TokenizerConfig) -> TokenizerConfig:
    return dataclasses.replace(
        tokenizer,
        tokenizer_type="HFTokenizer",
        tokenizer_model=str(corpus.tokenizer),
        vocab_size=None,
    )


def _is_configured(data: DataConfig, tokenizer: TokenizerConfig) -> bool:
    return data.names_data or _is_tokenizer_configured(tokenizer)


def _is_tokenizer_configured(tokenizer: TokenizerConfig) -> bool:
    sizes = {"vocab_size": tokenizer.vocab_size, "vocab_extra_ids": tokenizer.vocab_extra_ids}
    return tokenizer != TokenizerConfig(**sizes)
