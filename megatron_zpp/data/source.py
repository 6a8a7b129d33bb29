"""Which text a run reads: named files, made-up samples, or the standard library's own text."""

from dataclasses import replace
from pathlib import Path

from megatron_zpp.config import DataConfig, TokenizerConfig
from megatron_zpp.data.corpus import standard_library
from megatron_zpp.tokenizer import Tokenizer, build_tokenizer

DEFAULT_CACHE = ".cache"  # in the current folder


def open_source(
    data: DataConfig, tokenizer: TokenizerConfig
) -> tuple[DataConfig, Tokenizer]:
    """The data section with paths filled in where none were given, and the tokenizer.

    Without any path the corpus is the Python standard library, built on the first call and
    cached, with a tokenizer of its own unless one was named.
    """
    named = data.mock_data or data.data_path or data.train_data_path
    if named or tokenizer.tokenizer_type or tokenizer.vocab_file:
        return data, build_tokenizer(tokenizer)
    corpus = standard_library(Path(data.data_cache_path or DEFAULT_CACHE) / "standard-library")
    unsplit = data.split == DataConfig().split
    data = replace(
        data, data_path=(str(corpus.prefix),), split=corpus.split if unsplit else data.split
    )
    chosen = TokenizerConfig(tokenizer_type="HFTokenizer", tokenizer_model=str(corpus.tokenizer))
    return data, build_tokenizer(chosen)
