"""Tokenizers: one interface, and one file for each tokenizer."""

from megatron_zpp.tokenizer.base import Tokenizer
from megatron_zpp.tokenizer.factory import build_tokenizer, tokenizer_config_of

__all__ = ["Tokenizer", "build_tokenizer", "tokenizer_config_of"]
