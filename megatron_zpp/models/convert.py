"""Models from Hugging Face's folders into our checkpoints, and from our checkpoints into folders.

Tensor by tensor in both directions: what memory must hold is one tensor, not the model.
"""

import json
import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from megatron_zpp.checkpoint import checkpoint
from megatron_zpp.checkpoint.iteration_folders import candidates
from megatron_zpp.checkpoint.safetensors_files import DTYPES, SUFFIX, write_safetensors
from megatron_zpp.checkpoint.training_state import TrainingState, architecture, run_settings
from megatron_zpp.models import gguf
from megatron_zpp.models.hf_config import family_of, read_settings, write_settings
from megatron_zpp.models.hf_folder import CONFIG, ONE_FILE, is_hugging_face, read_config
from megatron_zpp.models.hf_weights import foreign_items
from megatron_zpp.models.open_model import BESIDE, OpenedModel, open_model
from megatron_zpp.models.peft_adapters import write_adapters
from megatron_zpp.models.tensor_forms import Sizes
from megatron_zpp.models.tokenizer_files import (
    GENERATION,
    copy_files,
    settings_folder,
    tokenizer_in,
    write_tokenizer,
)
from megatron_zpp.models.weight_names import TABLES
from megatron_zpp.settings.config import Config, ModelConfig, TokenizerConfig
from zeropp.atomic import write_atomically
from zeropp.errors import InputError

DTYPE_KEYS = ("dtype", "torch_dtype")  # of a config.json, the newer first

log = logging.getLogger("megatron_zpp")


def import_model(
    source: Path,
    save: Path,
    tokenizer: TokenizerConfig | None = None,
    multiple: int | None = None,
) -> OpenedModel:
    """Make `save` a folder of checkpoints with one, of iteration 0; returns it opened.

    Beside it, in `save`/hugging_face, lie the settings and the tokenizer. Raises InputError for
    what `open_model` refuses, and for a folder that holds checkpoints or another model already.
    """
    if candidates(save)[0]:
        raise InputError(f"--save {save} holds checkpoints already: name another folder")
    if is_hugging_face(save):  # which of the two would be opened?
        raise InputError(f"--save {save} holds a Hugging Face model: name another folder")
    opened = open_model(source, tokenizer, multiple)
    if opened.described is None or opened.path != source:
        raise InputError(f"--from-hf {source}: is a checkpoint of this program already")
    beside = save / BESIDE
    beside.mkdir(parents=True, exist_ok=True)
    content = _bring(opened, source, beside)
    _write_json(beside / CONFIG, content)
    chosen = tokenizer or tokenizer_in(beside) or opened.tokenizer_config
    config = Config(model=opened.config, tokenizer=chosen)
    state = TrainingState(
        iteration=0,
        consumed_samples=0,
        consumed_tokens=0,
        seed=config.training.seed,
        world_size=1,
        stage=0,
        tokenizer=opened.tokenizer.fingerprint,
        architecture=architecture(opened.config, opened.tokenizer.vocab_size),
        configuration=run_settings(config),
    )
    path = checkpoint.save_weights(save, opened.weights, state)
    return replace(opened, path=path, tokenizer_config=chosen)


def export_model(
    opened: OpenedModel, output: Path, dtype: str | None = None, most: int | None = None
) -> list[Path]:
    """Write a model of ours as a Hugging Face folder; returns the files of weights.

    Tensors keep their dtype if none is given; files take at most `most` bytes. config.json is
    written last. Raises InputError for a model that no known family of theirs can be, and for a
    folder that holds a model or checkpoints already.
    """
    if is_hugging_face(output) or any(output.glob(f"*{SUFFIX}")):
        raise InputError(f"--to-hf {output} holds a model already: name another folder")
    if candidates(output)[0]:
        raise InputError(f"--to-hf {output} holds checkpoints: name another folder")
    origin = _origin(opened)
    rows = opened.tokenizer.vocab_size
    if origin is not None:
        content = read_config(origin)
        rows = read_settings(content, str(origin / CONFIG)).vocab_rows
    else:
        content = write_settings(opened.config, rows, opened.tokenizer.eod)
    table = TABLES[family_of(opened.config).name]
    padded = opened.config.padded_vocab_size(opened.tokenizer.vocab_size)
    sizes = Sizes(model=opened.config, vocab_rows=rows, padded_rows=padded)
    items = foreign_items(opened.weights, table, sizes, DTYPES[dtype] if dtype else None)
    output.mkdir(parents=True, exist_ok=True)
    paths = write_safetensors(output / ONE_FILE, items, {"format": "pt"}, most)
    if origin is not None:
        copy_files(origin, output, (GENERATION,))
    if not write_tokenizer(opened.tokenizer_config, opened.tokenizer, output):
        log.warning("%s has no files that Hugging Face's libraries read: the folder has no "
                    "tokenizer", opened.tokenizer.name)  # fmt: skip
    _write_json(output / CONFIG, content | _dtype(content, {item.dtype for item in items}))
    return paths


def export_adapters(
    opened: OpenedModel, output: Path, dtype: str | None = None, base_name: str | None = None
) -> list[Path]:
    """Write a checkpoint's LoRA adapters as a folder of PEFT's; returns its files.

    `base_name` is what PEFT opens as their model, by default the folder that the model came from.
    Raises InputError for a model without adapters, for one that no family of theirs can be, and for
    a folder that holds adapters already.
    """
    if opened.adapters is None:
        raise InputError(
            f"{opened.path}: has no adapters of its own: expected a checkpoint of a run with "
            "--lora-rank; --to-hf writes whole models"
        )
    family = opened.described.family if opened.described else family_of(opened.config)
    padded = opened.config.padded_vocab_size(opened.tokenizer.vocab_size)
    sizes = Sizes(model=opened.config, vocab_rows=padded, padded_rows=padded)
    if base_name is None:
        base_name = str(opened.base.resolve())
        if not is_hugging_face(opened.base):
            log.warning(
                "%s is no folder that PEFT can open: name one, or the model's name on the Hub, by "
                "--base-name, or give it as the model to PeftModel.from_pretrained", base_name
            )  # fmt: skip
    wanted = DTYPES[dtype] if dtype else None
    return write_adapters(output, opened.adapters, TABLES[family.name], sizes, base_name, wanted)


def flags(opened: OpenedModel, save: Path) -> list[str]:
    """What pretrain_gpt.py must be given to go on with an imported model, a line for each group."""
    chosen = opened.tokenizer_config
    names = ("tokenizer_type", "vocab_file", "merge_file", "tokenizer_model", "vocab_size")
    return [
        f"--load {save} --finetune --use-checkpoint-args",
        " ".join(_flag(name, getattr(chosen, name)) for name in names if getattr(chosen, name)),
        f"--seq-length {opened.config.num_positions} or fewer; dropout was "
        f"--hidden-dropout {opened.config.hidden_dropout:g} "
        f"--attention-dropout {opened.config.attention_dropout:g}",
    ]


def _flag(name: str, value: Any) -> str:
    return f"--{name.replace('_', '-')} {value}"


def _bring(opened: OpenedModel, source: Path, beside: Path) -> dict[str, Any]:
    """Copy what comes with a model into `beside`; returns the content of its config.json."""
    if source.suffix == gguf.SUFFIX:
        model = opened.weights.tensors
        model.save_tokenizer(beside)
        return model.config
    copy_files(source, beside)
    return read_config(source)


def _origin(opened: OpenedModel) -> Path | None:
    """The folder with the config.json that the model came with, if it still describes it."""
    beside = opened.path.parent / BESIDE
    folder = beside if is_hugging_face(beside) else settings_folder(opened.tokenizer_config)
    if folder is None or not is_hugging_face(folder):
        return None
    described = read_settings(read_config(folder), str(folder / CONFIG))
    if _essence(described.model) != _essence(opened.config):
        log.info("%s describes another model and is not used", folder / CONFIG)
        return None
    return folder


def _essence(model: ModelConfig) -> dict[str, Any]:
    """What makes the weights and their meaning, but for the padding."""
    return architecture(replace(model, make_vocab_size_divisible_by=1), 0)


def _dtype(content: Mapping[str, Any], dtypes: set[torch.dtype]) -> dict[str, str]:
    """The entry that says in which dtype the weights are, under the name that is there already."""
    if len(dtypes) > 1:
        return {}
    key = next((key for key in DTYPE_KEYS if key in content), DTYPE_KEYS[-1])
    return {key: str(dtypes.pop()).removeprefix("torch.")}


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    text = json.dumps(content, indent=2) + "\n"
    write_atomically(path, lambda file: file.write(text.encode()))
