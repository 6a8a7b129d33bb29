"""Convert models from Hugging Face folders to our checkpoints, and back.

Both directions go tensor by tensor, so memory holds one tensor and not the model.
"""

import logging
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from megatron_zpp.checkpoint import checkpoint
from megatron_zpp.checkpoint.iteration_folders import candidates
from megatron_zpp.checkpoint.open_model import ORIGIN_FOLDER, OpenedModel
from megatron_zpp.checkpoint.safetensors_files import DTYPES, SUFFIX, Item, write_safetensors
from megatron_zpp.checkpoint.training_state import TrainingState, architecture
from megatron_zpp.interchange.adapters.peft_export import write_peft
from megatron_zpp.interchange.converted_weights import ConvertedWeights, converted_items
from megatron_zpp.interchange.families.forms import Sizes
from megatron_zpp.interchange.hf_config import (
    QUANTIZATION,
    build_config,
    comparable,
    family_of,
)
from megatron_zpp.interchange.hf_folder import (
    CONFIG,
    ONE_FILE,
    is_hugging_face,
    read_config,
    read_model,
    write_json,
)
from megatron_zpp.interchange.open_model import adapter_sizes, family_of_opened, open_model
from megatron_zpp.interchange.tokenizer_files import (
    GENERATION,
    copy_files,
    tokenizer_json_folder,
    write_tokenizer,
)
from megatron_zpp.settings.config import Config, TokenizerConfig
from megatron_zpp.tokenizer import tokenizer_config_of
from zeropp.errors import InputError
from zeropp.settings import settings_of

DTYPE_KEYS = ("dtype", "torch_dtype")  # of config.json, the newer first

log = logging.getLogger("megatron_zpp")


def import_model(
    source: Path,
    save: Path,
    tokenizer_config: TokenizerConfig | None = None,
    vocab_multiple: int | None = None,
) -> OpenedModel:
    """Write a checkpoint of iteration 0 to the folder `save`; returns the model, opened.

    `save`/hugging_face gets the model's config.json and its tokenizer. Raises InputError for what
    `open_model` refuses, and if `save` holds checkpoints or another model already.
    """
    require_no_model(save)
    opened = open_model(source, tokenizer_config, vocab_multiple)
    if not isinstance(opened.weights, ConvertedWeights):
        raise InputError(f"--from-hf {source}: is a checkpoint of this program already")
    origin = save / ORIGIN_FOLDER
    origin.mkdir(parents=True, exist_ok=True)
    copy_files(opened.origin, origin)
    write_json(origin / CONFIG, read_config(opened.origin))
    tokenizer_config = tokenizer_config or tokenizer_config_of(origin) or opened.tokenizer_config
    config = Config(model=opened.config, tokenizer=tokenizer_config)
    state = TrainingState(
        iteration=0,
        consumed_samples=0,
        consumed_tokens=0,
        seed=config.training.seed,
        world_size=1,
        stage=0,
        tokenizer=opened.tokenizer.fingerprint,
        architecture=architecture(opened.config, opened.tokenizer.vocab_size),
        configuration=config.to_dict(),
    )
    path = checkpoint.save_weights(save, opened.weights, state)
    return replace(opened, path=path, tokenizer_config=tokenizer_config)


def require_no_model(save: Path) -> None:
    """Raise InputError if the folder for a model's checkpoint holds checkpoints or a model."""
    if candidates(save)[0]:
        raise InputError(f"--save {save} holds checkpoints already: name another folder")
    if is_hugging_face(save):  # opening `save` would be ambiguous
        raise InputError(f"--save {save} holds a Hugging Face model: name another folder")


def export_model(
    opened: OpenedModel, output: Path, dtype: str | None = None, max_bytes: int | None = None
) -> tuple[list[Path], bool]:
    """Write one of our models as a Hugging Face folder.

    Returns the files of weights, and whether the folder has the tokenizer, as Hugging Face's
    libraries do not have all tokenizers. Tensors keep their dtype without `dtype`. Files have at
    most `max_bytes`.
    config.json is written last. Raises InputError for a model that no supported family can express,
    and if `output` holds a model or checkpoints already.
    """
    if is_hugging_face(output) or any(output.glob(f"*{SUFFIX}")):
        raise InputError(f"--to-hf {output} holds a model already: name another folder")
    if candidates(output)[0]:
        raise InputError(f"--to-hf {output} holds checkpoints: name another folder")
    origin = _matching_origin(opened)
    if origin is not None:
        content, hf_config = read_config(origin), read_model(origin)
        content.pop(QUANTIZATION, None)  # the weights that are written are decoded
        family, vocab_rows = hf_config.family, hf_config.vocab_rows
        if hf_config.further_layers:
            content[family.further_layers] = 0  # their weights were left out
    else:
        family, vocab_rows = family_of(opened.config), opened.tokenizer.vocab_size
        content = build_config(opened.config, vocab_rows, opened.tokenizer.eod)
    sizes = Sizes(model=opened.config, vocab_rows=vocab_rows, padded_rows=opened.padded_vocab_size)
    dtype = DTYPES[dtype] if dtype else None
    items = converted_items(opened.weights, family.names, sizes, dtype)
    output.mkdir(parents=True, exist_ok=True)
    paths = write_safetensors(output / ONE_FILE, items, {"format": "pt"}, max_bytes)
    if origin is not None:
        copy_files(origin, output, (GENERATION,))
    has_tokenizer = bool(write_tokenizer(opened.tokenizer_config, opened.tokenizer, output))
    content |= _dtype_entries(content, items)
    write_json(output / CONFIG, content)
    return paths, has_tokenizer


def export_adapters(
    opened: OpenedModel, output: Path, dtype: str | None = None, base_name: str | None = None
) -> list[Path]:
    """Write a checkpoint's LoRA adapters as a PEFT folder; returns its files.

    `base_name` is what PEFT opens as the base model, by default the folder of the base. Raises
    InputError for a model without adapters, for one that no supported family can express, and if
    `output` holds adapters already.
    """
    if opened.added is None:
        raise InputError(
            f"{opened.path}: has no adapters of its own: expected a checkpoint of a run with "
            "--lora-rank; --to-hf writes whole models"
        )
    table = family_of_opened(opened).names
    if base_name is None:
        base_name = str(opened.base.resolve())
        if not is_hugging_face(opened.base):
            log.warning(
                f"{base_name} is not a folder that PEFT can open: give --base-name with a Hugging "
                "Face folder or the model's name on the Hub, or pass the model to "
                "PeftModel.from_pretrained"
            )
    sizes, number_format = adapter_sizes(opened), DTYPES[dtype] if dtype else None
    return write_peft(output, opened.added, table, sizes, base_name, number_format)


def training_flags(opened: OpenedModel, save: Path) -> list[str]:
    """Return the flags with which pretrain_gpt.py continues from an imported model, in lines."""
    tokenizer_flags = [
        flag.assignment(value)
        for flag in settings_of(TokenizerConfig)
        if (value := getattr(opened.tokenizer_config, flag.name))
    ]
    return [
        f"--load {save} --finetune --use-checkpoint-args",
        " ".join(tokenizer_flags),
        f"--seq-length {opened.config.num_positions} or fewer; dropout was "
        f"--hidden-dropout {opened.config.hidden_dropout:g} "
        f"--attention-dropout {opened.config.attention_dropout:g}",
    ]


def _matching_origin(opened: OpenedModel) -> Path | None:
    """Return the folder with the config.json of the model's origin, if it describes the model."""
    origin = opened.path.parent / ORIGIN_FOLDER
    if not is_hugging_face(origin):
        origin = tokenizer_json_folder(opened.tokenizer_config)
    if origin is None or not is_hugging_face(origin):
        return None
    if comparable(read_model(origin).model) != comparable(opened.config):
        log.info("%s describes another model and is not used", origin / CONFIG)
        return None
    return origin


def _dtype_entries(content: Mapping[str, Any], items: Sequence[Item]) -> dict[str, str]:
    """Return entries for the dtype of most weights, under the keys that `content` has for it."""
    elements: Counter[torch.dtype] = Counter()
    for item in items:
        elements[item.dtype] += math.prod(item.shape)
    keys = [key for key in DTYPE_KEYS if key in content] or DTYPE_KEYS[-1:]
    ((dtype, _),) = elements.most_common(1)
    return dict.fromkeys(keys, str(dtype).removeprefix("torch."))
