"""Text to token ids and back: one interface, one tokenizer a file."""

from megatron_zpp.tokenizer.base import Tokenizer
from megatron_zpp.tokenizer.build import build_tokenizer

__all__ = ["Tokenizer", "build_tokenizer"]
