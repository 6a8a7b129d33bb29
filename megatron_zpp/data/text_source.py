"""Which text a run reads: named files, made-up samples, or the standard library's own text."""

import dataclasses
import logging
from pathlib import Path

from megatron_zpp.data.corpus import VOCAB_SIZE, Corpus, standard_library
from megatron_zpp.settings.config import DataConfig, TokenizerConfig
from megatron_zpp.settings.data import names_examples
from megatron_zpp.tokenizer import Tokenizer, build_tokenizer

DEFAULT_CACHE = ".cache"  # in the current folder

log = logging.getLogger("megatron_zpp")


def open_source(data: DataConfig, tokenizer: TokenizerConfig) -> tuple[DataConfig, Tokenizer]:
    """The data section with paths filled in where none were given, and the tokenizer.

    Without any path and any tokenizer the corpus is the Python standard library with a tokenizer
    of its own, both built on the first call and cached. Documents are kept apart if the paths are
    files of examples. Raises InputError for what is missing.
    """
    if names_examples(data) and not (data.reset_attention_mask and data.reset_position_ids):
        data = dataclasses.replace(data, reset_attention_mask=True, reset_position_ids=True)
        log.info("examples: --reset-attention-mask and --reset-position-ids keep them apart")
    if _is_named(data, tokenizer):
        return data, build_tokenizer(tokenizer)
    corpus = standard_library(Path(data.data_cache_path or DEFAULT_CACHE) / "standard-library")
    unsplit = data.split == DataConfig().split
    data = dataclasses.replace(
        data, data_path=(str(corpus.prefix),), split=corpus.split if unsplit else data.split
    )
    return data, build_tokenizer(_of_corpus(corpus, tokenizer))


def tokenizer_of(cache: str | None, tokenizer: TokenizerConfig) -> TokenizerConfig:
    """`tokenizer`, or where it names none, that of the standard library's text under `cache`."""
    if tokenizer != TokenizerConfig(vocab_extra_ids=tokenizer.vocab_extra_ids):
        return tokenizer
    corpus = standard_library(Path(cache or DEFAULT_CACHE) / "standard-library")
    return _of_corpus(corpus, tokenizer)


def vocab_size(data: DataConfig, tokenizer: TokenizerConfig) -> int:
    """The entries of the tokenizer that `open_source` would open; no text is read for it."""
    if _is_named(data, tokenizer):
        return build_tokenizer(tokenizer).vocab_size
    return VOCAB_SIZE + tokenizer.vocab_extra_ids


def _of_corpus(corpus: Corpus, tokenizer: TokenizerConfig) -> TokenizerConfig:
    return dataclasses.replace(
        tokenizer, tokenizer_type="HFTokenizer", tokenizer_model=str(corpus.tokenizer)
    )


def _is_named(data: DataConfig, tokenizer: TokenizerConfig) -> bool:
    paths = (data.data_path, data.train_data_path, data.valid_data_path, data.test_data_path)
    unnamed = TokenizerConfig(vocab_extra_ids=tokenizer.vocab_extra_ids)
    return data.mock_data or any(paths) or tokenizer != unnamed
