"""The files of a tokenizer that accompany a model."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_zpp.interchange.hf_folder import write_json
from megatron_zpp.interchange.tokenizer_json import byte_level_json, sentence_piece_json
from megatron_zpp.settings.config import TokenizerConfig
from megatron_zpp.tokenizer import Tokenizer
from megatron_zpp.tokenizer.base import read_json
from megatron_zpp.tokenizer.factory import (
    MERGES,
    SENTENCE_PIECE_TYPES,
    SENTENCEPIECE,
    TYPES_WITH_TOKENIZER_JSON,
    VOCABULARY,
)
from megatron_zpp.tokenizer.hugging_face import TOKENIZER_JSON
from zeropp.atomic import write_atomically

SETTINGS = "tokenizer_config.json"
GENERATION = "generation_config.json"
FILES = (
    TOKENIZER_JSON,
    VOCABULARY,
    MERGES,
    SENTENCEPIECE,
    SETTINGS,
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    GENERATION,
)


def copy_files(source: Path, target: Path, names: tuple[str, ...] = FILES) -> list[str]:
    """Copy those of the files that exist, each complete or not at all; returns their names."""
    present = [name for name in names if (source / name).is_file()]
    for name in present:
        _copy_file(source / name, target / name)
    return present


def tokenizer_json_folder(config: TokenizerConfig) -> Path | None:
    """Return the folder of the tokenizer.json that `config` names; None if it names none."""
    if config.kind not in TYPES_WITH_TOKENIZER_JSON:
        return None
    path = Path(config.tokenizer_model)
    return path if path.is_dir() else path.parent


def write_tokenizer(config: TokenizerConfig, tokenizer: Tokenizer, target: Path) -> list[str]:
    """Write the files of a tokenizer as Hugging Face's libraries read them; returns their names.

    They make the same ids of a text. Writes nothing for a tokenizer that they do not have.
    """
    if config.kind in TYPES_WITH_TOKENIZER_JSON:
        written, added = _copy_tokenizer_json(config, target), tokenizer.reserved
    elif config.kind == "GPT2BPETokenizer":
        written, added = _copy_byte_pairs(config, target), tokenizer.reserved
    else:
        written, added = _write_tokenizer_json(config, tokenizer, target), {}
    if not written or (SETTINGS in written and not added):
        return written
    if SETTINGS in written:
        settings = read_json(target / SETTINGS, "the tokenizer's")
    else:
        end = tokenizer.name_of(tokenizer.eod)
        settings = _settings(end, is_gpt2=TOKENIZER_JSON not in written)
        written.append(SETTINGS)
    if added:
        added_tokens = settings.get("added_tokens_decoder", {}) | _added_tokens(added)
        settings["added_tokens_decoder"] = added_tokens
    write_json(target / SETTINGS, settings, ensure_ascii=False)
    return written


def _settings(end: str, *, is_gpt2: bool) -> dict[str, Any]:
    """Return the content of a tokenizer_config.json for the token that ends a document."""
    if is_gpt2:
        special_tokens = dict.fromkeys(("bos_token", "eos_token", "unk_token"), end)
        return {"tokenizer_class": "GPT2Tokenizer", **special_tokens}
    return {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end}


def _added_tokens(reserved: Mapping[int, str]) -> dict[str, dict[str, Any]]:
    """Return the entries of a tokenizer_config.json for ids that no file has."""
    flags = dict.fromkeys(("lstrip", "normalized", "rstrip", "single_word"), False)
    return {
        str(number): {"content": name, **flags, "special": True}
        for number, name in reserved.items()
    }


def _copy_tokenizer_json(config: TokenizerConfig, target: Path) -> list[str]:
    source = Path(config.tokenizer_model)
    written = copy_files(tokenizer_json_folder(config), target)
    if source.is_file() and source.name != TOKENIZER_JSON:
        _copy_file(source, target / TOKENIZER_JSON)
        written.append(TOKENIZER_JSON)
    return written


def _copy_byte_pairs(config: TokenizerConfig, target: Path) -> list[str]:
    _copy_file(Path(config.vocab_file), target / VOCABULARY)
    _copy_file(Path(config.merge_file), target / MERGES)
    return [VOCABULARY, MERGES]


def _write_tokenizer_json(config: TokenizerConfig, tokenizer: Tokenizer, target: Path) -> list[str]:
    written, text = [TOKENIZER_JSON], None
    if config.kind == "ByteLevelTokenizer":
        text = byte_level_json(tokenizer)
    elif config.kind in SENTENCE_PIECE_TYPES:
        source = Path(config.tokenizer_model)
        opens = config.kind == "Llama2Tokenizer"
        text = sentence_piece_json(source.read_bytes(), tokenizer, opens=opens)
        written.append(SENTENCEPIECE)
    if text is None:
        return []
    if SENTENCEPIECE in written:
        _copy_file(source, target / SENTENCEPIECE)
    write_atomically(target / TOKENIZER_JSON, text)
    return written


def _copy_file(source: Path, target: Path) -> None:
    with open(source, "rb") as content:
        write_atomically(target, lambda file: shutil.copyfileobj(content, file))
