"""From the tokenizer's section of the configuration to the tokenizer."""

import difflib
import logging
from collections.abc import Callable

from megatron_zpp.settings.config import TokenizerConfig
from megatron_zpp.tokenizer.base import Tokenizer
from megatron_zpp.tokenizer.byte_level import ByteLevelTokenizer
from megatron_zpp.tokenizer.gpt2_bpe import GPT2BPETokenizer
from megatron_zpp.tokenizer.hugging_face import HFTokenizer
from megatron_zpp.tokenizer.null import NullTokenizer
from megatron_zpp.tokenizer.sentence_piece import (
    GPTSentencePieceTokenizer,
    Llama2Tokenizer,
    SentencePieceTokenizer,
)
from zeropp.errors import InputError

# --tokenizer-type -> the tokenizer and the fields of TokenizerConfig that it is made from.
TOKENIZERS: tuple[tuple[str, Callable[..., Tokenizer], tuple[str, ...]], ...] = (
    ("GPT2BPETokenizer", GPT2BPETokenizer, ("vocab_file", "merge_file")),
    ("SentencePieceTokenizer", SentencePieceTokenizer, ("tokenizer_model",)),
    ("GPTSentencePieceTokenizer", GPTSentencePieceTokenizer, ("tokenizer_model",)),
    ("Llama2Tokenizer", Llama2Tokenizer, ("tokenizer_model",)),
    ("HFTokenizer", HFTokenizer, ("tokenizer_model",)),
    ("HuggingFaceTokenizer", HFTokenizer, ("tokenizer_model",)),
    ("ByteLevelTokenizer", ByteLevelTokenizer, ()),
    ("NullTokenizer", NullTokenizer, ("vocab_size",)),
)
FIELDS = ("vocab_file", "merge_file", "tokenizer_model", "vocab_size")

logger = logging.getLogger("megatron_zpp")


def build_tokenizer(config: TokenizerConfig) -> Tokenizer:
    """Make the tokenizer that --tokenizer-type names.

    Without a type, --vocab-file and --merge-file mean GPT2BPETokenizer, as in Megatron.
    Raises InputError for an unknown type, a flag that is missing and files that are no good.
    """
    kind = config.tokenizer_type
    if kind is None and config.vocab_file is not None and config.merge_file is not None:
        kind = "GPT2BPETokenizer"
    names = [name for name, _, _ in TOKENIZERS]
    if kind not in names:
        raise InputError(_unknown(kind, names))
    _, tokenizer, fields = TOKENIZERS[names.index(kind)]
    missing = [_flag(field) for field in fields if getattr(config, field) is None]
    if missing:
        raise InputError(f"--tokenizer-type {kind} needs {' and '.join(missing)}")
    for field in FIELDS:
        if field not in fields and getattr(config, field) is not None:
            logger.info(
                "%s %s has no effect with --tokenizer-type %s",
                _flag(field),
                getattr(config, field),
                kind,
            )
    return tokenizer(*(getattr(config, field) for field in fields), config.vocab_extra_ids)


def _unknown(kind: str | None, names: list[str]) -> str:
    if kind is None:
        return f"no tokenizer: give --tokenizer-type, one of {', '.join(names)}"
    near = difflib.get_close_matches(kind, names, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    return f"--tokenizer-type {kind}: not one of {', '.join(names)}{hint}"


def _flag(field: str) -> str:
    return "--" + field.replace("_", "-")
