"""The files of a tokenizer that travel with a model, and which of our flags they are for."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_zpp.settings.config import TokenizerConfig
from megatron_zpp.tokenizer import Tokenizer
from zeropp.atomic import write_atomically

FAST, VOCABULARY, MERGES, PIECES = "tokenizer.json", "vocab.json", "merges.txt", "tokenizer.model"
SETTINGS, GENERATION = "tokenizer_config.json", "generation_config.json"
FILES = (
    FAST, VOCABULARY, MERGES, PIECES, SETTINGS,
    "special_tokens_map.json", "added_tokens.json", "chat_template.jinja", "chat_template.json",
    GENERATION,
)  # fmt: skip
TYPES_WITH_TOKENIZER_JSON = ("HFTokenizer", "HuggingFaceTokenizer")


def copy_files(source: Path, target: Path, names: tuple[str, ...] = FILES) -> list[str]:
    """Copy those of the files that there are, each complete or not at all; returns their names."""
    present = [name for name in names if (source / name).is_file()]
    for name in present:
        with open(source / name, "rb") as content:
            write_atomically(target / name, lambda file, c=content: shutil.copyfileobj(c, file))
    return present


def tokenizer_in(folder: Path) -> TokenizerConfig | None:
    """The flags for the tokenizer in a Hugging Face folder, or None if there is none."""
    if (folder / FAST).is_file():
        return TokenizerConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(folder))
    if (folder / VOCABULARY).is_file() and (folder / MERGES).is_file():
        return TokenizerConfig(
            tokenizer_type="GPT2BPETokenizer",
            vocab_file=str(folder / VOCABULARY),
            merge_file=str(folder / MERGES),
        )
    if (folder / PIECES).is_file():
        return TokenizerConfig(
            tokenizer_type="GPTSentencePieceTokenizer", tokenizer_model=str(folder / PIECES)
        )
    return None


def settings_folder(config: TokenizerConfig) -> Path | None:
    """The folder that holds a tokenizer.json, and perhaps a config.json beside it."""
    if config.tokenizer_type not in TYPES_WITH_TOKENIZER_JSON:
        return None
    path = Path(config.tokenizer_model)
    return path if path.is_dir() else path.parent


def write_tokenizer(config: TokenizerConfig, tokenizer: Tokenizer, target: Path) -> list[str]:
    """Write the files of one of our tokenizers for Hugging Face's; returns their names.

    Nothing is written of a tokenizer that needs no files.
    """
    if config.tokenizer_type in TYPES_WITH_TOKENIZER_JSON:
        return _write_fast(config, tokenizer, target)
    sources = {VOCABULARY: config.vocab_file, MERGES: config.merge_file}
    kind = "GPT2Tokenizer"
    if config.tokenizer_type != "GPT2BPETokenizer":
        sources, kind = {PIECES: config.tokenizer_model}, "LlamaTokenizer"
    if None in sources.values():
        return []
    for name, source in sources.items():
        with open(source, "rb") as content:
            write_atomically(target / name, lambda file, c=content: shutil.copyfileobj(c, file))
    if kind == "GPT2Tokenizer":
        end = tokenizer.decode([tokenizer.eod])
        words = dict.fromkeys(("bos_token", "eos_token", "unk_token"), end)
        _write_json(target / SETTINGS, {"tokenizer_class": kind, **words})
        return [*sources, SETTINGS]
    _write_json(target / SETTINGS, {"tokenizer_class": kind})
    return [*sources, SETTINGS]


def _write_fast(config: TokenizerConfig, tokenizer: Tokenizer, target: Path) -> list[str]:
    given, folder = Path(config.tokenizer_model), settings_folder(config)
    written = copy_files(folder, target)
    if given.is_file() and given.name != FAST:
        with open(given, "rb") as content:
            write_atomically(target / FAST, lambda file: shutil.copyfileobj(content, file))
        written.append(FAST)
    if SETTINGS not in written:
        end = tokenizer.decode([tokenizer.eod])
        _write_json(
            target / SETTINGS, {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end}
        )
        written.append(SETTINGS)
    return written


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
    write_atomically(path, lambda file: file.write(text.encode()))
