"""Build the tokenizer that the tokenizer section of the configuration describes."""

import difflib
import logging
from pathlib import Path
from types import MappingProxyType

from megatron_zpp.settings.config import TokenizerConfig
from megatron_zpp.tokenizer.base import ByteLevelTokenizer, NullTokenizer, Tokenizer
from megatron_zpp.tokenizer.gpt2_bpe import GPT2BPETokenizer
from megatron_zpp.tokenizer.hugging_face import TOKENIZER_JSON, HFTokenizer
from megatron_zpp.tokenizer.sentence_piece import (
    GPTSentencePieceTokenizer,
    Llama2Tokenizer,
    SentencePieceTokenizer,
)
from zeropp.errors import InputError

# Names of files in a Hugging Face folder.
VOCABULARY, MERGES, SENTENCEPIECE = "vocab.json", "merges.txt", "tokenizer.model"
HF_FIELDS = ("tokenizer_model", "tokenizer_hf_no_include_special_tokens")
# The values of --tokenizer-type: a class, and the fields of TokenizerConfig that it takes.
TOKENIZER_TYPES = MappingProxyType(
    {
        "GPT2BPETokenizer": (GPT2BPETokenizer, ("vocab_file", "merge_file")),
        "SentencePieceTokenizer": (SentencePieceTokenizer, ("tokenizer_model",)),
        "GPTSentencePieceTokenizer": (GPTSentencePieceTokenizer, ("tokenizer_model",)),
        "Llama2Tokenizer": (Llama2Tokenizer, ("tokenizer_model",)),
        "HFTokenizer": (HFTokenizer, HF_FIELDS),
        "HuggingFaceTokenizer": (HFTokenizer, HF_FIELDS),
        "PretrainedFromHF": (HFTokenizer, HF_FIELDS),  # BigScience's name of it
        "TokenizerFromFile": (HFTokenizer, HF_FIELDS),  # BigCode's
        "TokenizerFromFileWithFIM": (HFTokenizer, HF_FIELDS),
        "ByteLevelTokenizer": (ByteLevelTokenizer, ()),
        "NullTokenizer": (NullTokenizer, ("vocab_size",)),
    }
)
TYPES_WITH_TOKENIZER_JSON = tuple(
    name for name, (kind, _) in TOKENIZER_TYPES.items() if kind is HFTokenizer
)
SENTENCE_PIECE_TYPES = tuple(
    name for name, (kind, _) in TOKENIZER_TYPES.items() if issubclass(kind, SentencePieceTokenizer)
)
FIELDS = ("vocab_file", "merge_file", *HF_FIELDS, "vocab_size")

logger = logging.getLogger("megatron_zpp")


def build_tokenizer(config: TokenizerConfig) -> Tokenizer:
    """Return the tokenizer that --tokenizer-type names.

    Without a type, --vocab-file and --merge-file select GPT2BPETokenizer, as in Megatron.
    Raises InputError for an unknown type, a missing flag, and invalid files.
    """
    name = config.kind
    if name not in TOKENIZER_TYPES:
        raise _unknown_type_error(name, list(TOKENIZER_TYPES))
    tokenizer_class, fields = TOKENIZER_TYPES[name]
    missing = [_flag(field) for field in fields if getattr(config, field) is None]
    if missing:
        raise InputError(f"--tokenizer-type {name} needs {' and '.join(missing)}")
    for field in FIELDS:
        value = getattr(config, field)
        if field not in fields and value not in (None, False):
            given = _flag(field) if value is True else f"{_flag(field)} {value}"
            logger.info("%s has no effect with --tokenizer-type %s", given, name)
    arguments = [getattr(config, field) for field in fields]
    if tokenizer_class is NullTokenizer:
        return NullTokenizer(*arguments, config.vocab_extra_ids, config.null_tokenizer_eod_id)
    return tokenizer_class(*arguments, config.vocab_extra_ids)


def tokenizer_config_of(folder: Path) -> TokenizerConfig | None:
    """Return the settings for the tokenizer in a Hugging Face folder, or None without one."""
    if (folder / TOKENIZER_JSON).is_file():
        return TokenizerConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(folder))
    if (folder / VOCABULARY).is_file() and (folder / MERGES).is_file():
        return TokenizerConfig(
            tokenizer_type="GPT2BPETokenizer",
            vocab_file=str(folder / VOCABULARY),
            merge_file=str(folder / MERGES),
        )
    if (folder / SENTENCEPIECE).is_file():
        return TokenizerConfig(
            tokenizer_type="GPTSentencePieceTokenizer",
            tokenizer_model=str(folder / SENTENCEPIECE),
        )
    return None


def _unknown_type_error(name: str | None, names: list[str]) -> InputError:
    if name is None:
        return InputError(f"no tokenizer: give --tokenizer-type, one of {', '.join(names)}")
    close_matches = difflib.get_close_matches(name, names, n=1)
    hint = f"; did you mean {close_matches[0]}?" if close_matches else ""
    return InputError(f"--tokenizer-type {name}: not one of {', '.join(names)}{hint}")


def _flag(field: str) -> str:
    return "--" + field.replace("_", "-")
