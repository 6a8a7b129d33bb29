"""The files of a tokenizer that accompany a model, and the TokenizerConfig that reads them."""

import shutil
from pathlib import Path

from megatron_zpp.models.hf_folder import write_json
from megatron_zpp.settings.config import TokenizerConfig
from megatron_zpp.tokenizer import Tokenizer
from megatron_zpp.tokenizer.factory import TYPES_WITH_TOKENIZER_JSON
from zeropp.atomic import write_atomically

TOKENIZER_JSON = "tokenizer.json"
VOCABULARY = "vocab.json"
MERGES = "merges.txt"
SENTENCEPIECE = "tokenizer.model"
SETTINGS = "tokenizer_config.json"
GENERATION = "generation_config.json"
FILES = (
    TOKENIZER_JSON, VOCABULARY, MERGES, SENTENCEPIECE, SETTINGS,
    "special_tokens_map.json", "added_tokens.json", "chat_template.jinja", "chat_template.json",
    GENERATION,
)  # fmt: skip


def copy_files(source: Path, target: Path, names: tuple[str, ...] = FILES) -> list[str]:
    """Copy those of the files that exist, each complete or not at all; returns their names."""
    present = [name for name in names if (source / name).is_file()]
    for name in present:
        _copy_file(source / name, target / name)
    return present


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


def tokenizer_json_folder(config: TokenizerConfig) -> Path | None:
    """Return the folder of the tokenizer.json that `config` names; None if it names none."""
    if config.tokenizer_type not in TYPES_WITH_TOKENIZER_JSON:
        return None
    path = Path(config.tokenizer_model)
    return path if path.is_dir() else path.parent


def write_tokenizer(config: TokenizerConfig, tokenizer: Tokenizer, target: Path) -> list[str]:
    """Write the files of a tokenizer as Hugging Face's libraries read them; returns their names.

    Writes nothing for a tokenizer that needs no files.
    """
    if config.tokenizer_type in TYPES_WITH_TOKENIZER_JSON:
        return _write_tokenizer_json(config, tokenizer, target)
    if config.tokenizer_type == "GPT2BPETokenizer":
        sources = {VOCABULARY: config.vocab_file, MERGES: config.merge_file}
        end = tokenizer.decode([tokenizer.eod])
        special_tokens = dict.fromkeys(("bos_token", "eos_token", "unk_token"), end)
        settings = {"tokenizer_class": "GPT2Tokenizer", **special_tokens}
    else:
        sources = {SENTENCEPIECE: config.tokenizer_model}
        settings = {"tokenizer_class": "LlamaTokenizer"}
    if None in sources.values():
        return []
    for name, source in sources.items():
        _copy_file(Path(source), target / name)
    write_json(target / SETTINGS, settings, ensure_ascii=False)
    return [*sources, SETTINGS]


def _write_tokenizer_json(config: TokenizerConfig, tokenizer: Tokenizer, target: Path) -> list[str]:
    source = Path(config.tokenizer_model)
    written = copy_files(tokenizer_json_folder(config), target)
    if source.is_file() and source.name != TOKENIZER_JSON:
        _copy_file(source, target / TOKENIZER_JSON)
        written.append(TOKENIZER_JSON)
    if SETTINGS not in written:
        end = tokenizer.decode([tokenizer.eod])
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end}
        write_json(target / SETTINGS, settings, ensure_ascii=False)
        written.append(SETTINGS)
    return written


def _copy_file(source: Path, target: Path) -> None:
    with open(source, "rb") as content:
        write_atomically(target, lambda file: shutil.copyfileobj(content, file))
