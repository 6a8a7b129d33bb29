"""PEFT's folders of LoRA adapters: adapter_config.json and adapter_model.safetensors.

Layers that are one in our model and several in theirs (queries, keys, values) go out with the same
A and with the rows of B that are theirs. What comes in may have an A for each; it is merged.
"""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from megatron_zpp.checkpoint.safetensors_files import SUFFIX, Item, write_safetensors
from megatron_zpp.model.lora import A, B
from megatron_zpp.models.hf_config import MOST
from megatron_zpp.models.hf_folder import FolderTensors
from megatron_zpp.models.hf_weights import shapes
from megatron_zpp.models.lora_adapters import WEIGHT, Adapters
from megatron_zpp.models.tensor_forms import Sizes
from megatron_zpp.models.weight_names import Table
from megatron_zpp.tokenizer.base import read_json
from zeropp.atomic import write_atomically
from zeropp.errors import InputError, first_few

CONFIG = "adapter_config.json"
TENSORS = f"adapter_model{SUFFIX}"
BASE = "base_model_name_or_path"
PEFT_DEFAULT = 8  # of r and lora_alpha
NUMBERS = (("r", int, "a whole number"), ("lora_alpha", int | float, "a number"))
MOST_LINES = 40
PREFIX = "base_model.model."  # PEFT's wrappers
# What PEFT can do with LoRA, and merging alpha / rank · B A alone would leave out.
ONLY: Mapping[str, Any] = MappingProxyType({"peft_type": "LORA", "bias": "none"})
WITHOUT = (
    "use_dora", "lora_bias", "modules_to_save", "rank_pattern", "alpha_pattern",
    "layer_replication", "target_parameters", "trainable_token_indices", "alora_invocation_tokens",
)  # fmt: skip


def is_adapters(folder: Path) -> bool:
    """Whether a folder is one of PEFT's."""
    return (folder / CONFIG).is_file()


def write_adapters(
    output: Path,
    adapters: Adapters,
    table: Table,
    sizes: Sizes,
    base_name: str,
    dtype: torch.dtype | None = None,
) -> list[Path]:
    """Write adapters as PEFT's folder, the settings last; returns its files.

    `base_name` is what PEFT opens as the model; dtype None keeps each tensor's. Raises InputError
    for a folder that holds adapters already.
    """
    if is_adapters(output) or (output / TENSORS).exists():
        raise InputError(f"--to-peft {output} holds adapters already: name another folder")
    items, adapted, is_inputs_first = [], [], False
    for layer in adapters.layers:
        row = table.row(layer + WEIGHT)
        theirs = [name.removesuffix(WEIGHT) for name in row.theirs]
        is_inputs_first |= row.form.is_inputs_first
        items += _items(adapters, layer, theirs, row.form.split_rows, sizes)
        adapted += theirs
    lora = adapters.config
    modules = [
        name.removesuffix(WEIGHT)
        for ours in shapes(sizes.model, sizes.padded_rows)
        for name in table.row(ours).theirs
        if name.endswith(WEIGHT)
    ]
    content = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        BASE: base_name,
        "r": lora.lora_rank,
        "lora_alpha": int(lora.lora_alpha) if lora.lora_alpha % 1 == 0 else lora.lora_alpha,
        "lora_dropout": lora.lora_dropout,
        "target_modules": targets(adapted, modules),
        "fan_in_fan_out": is_inputs_first,
        "bias": "none",
        "modules_to_save": None,
        "inference_mode": True,
    }
    if dtype is not None:
        items = [Item(name=i.name, shape=i.shape, dtype=dtype, read=i.read) for i in items]
    output.mkdir(parents=True, exist_ok=True)
    paths = write_safetensors(output / TENSORS, items, {"format": "pt"})
    text = json.dumps(content, indent=2) + "\n"
    write_atomically(output / CONFIG, lambda file: file.write(text.encode()))
    return [*paths, output / CONFIG]


def targets(adapted: Sequence[str], modules: Sequence[str]) -> list[str]:
    """The shortest endings of names that match all of `adapted`, and of `modules` nothing else."""
    mine, others = set(adapted), set(modules) - set(adapted)
    taken = {ending for name in others for ending in _endings(name)}
    return sorted(
        {next(ending for ending in _endings(name) if ending not in taken) for name in mine}
    )


class PeftChanges:
    """What the adapters of a PEFT folder add to the weights of our model, by our layers' names.

    Raises InputError for a damaged folder, for what is more than plain LoRA, and for tensors that
    are not adapters of the model's layers, each named.
    """

    def __init__(self, folder: Path, table: Table, sizes: Sizes) -> None:
        self.place, self._sizes = str(folder), sizes
        content = read_adapter_config(folder)
        self._rank, alpha = content.get("r", PEFT_DEFAULT), content.get("lora_alpha", PEFT_DEFAULT)
        root = math.sqrt if content.get("use_rslora") else float
        self._scaling = alpha / root(self._rank)
        self._tensors = FolderTensors(folder, TENSORS)
        self._facts = self._tensors.facts()
        self._whole = {
            name.removesuffix(WEIGHT): one
            for name, one in shapes(sizes.model, sizes.padded_rows).items()
            if name.startswith("blocks.") and one.ndim == 2
        }
        self._rows = {layer: table.row(layer + WEIGHT) for layer in self._whole}
        self._check()
        self.layers = [
            layer for layer, row in self._rows.items()
            if any(_names(name.removesuffix(WEIGHT))[0] in self._facts for name in row.theirs)
        ]  # fmt: skip

    def shape(self, layer: str) -> torch.Size:
        """Outputs and inputs of a layer."""
        return self._whole[layer].shape

    def change(self, layer: str) -> Tensor:
        """What is added to its weight: fp32 [out, in]."""
        row = self._rows[layer]
        parts = row.form.split(self._whole[layer], self._sizes)
        changes = [
            self._change(name.removesuffix(WEIGHT), part.shape, row.form.is_inputs_first)
            for name, part in zip(row.theirs, parts, strict=True)
        ]
        return row.form.join(changes, self._sizes).contiguous()

    def _change(self, theirs: str, shape: torch.Size, is_inputs_first: bool) -> Tensor:
        names = _names(theirs)
        if names[0] not in self._facts:
            return torch.zeros(shape)
        thin, wide = (self._tensors.read(name).float() for name in names)
        change = wide @ thin * self._scaling
        return change.T if is_inputs_first else change

    def _check(self) -> None:
        known: dict[str, tuple[list[int], str]] = {}  # shape, and the one that belongs to it
        for layer, row in self._rows.items():
            parts = row.form.split_rows(self._whole[layer], self._sizes)
            for theirs, part in zip(row.theirs, parts, strict=True):
                thin, wide = _names(theirs.removesuffix(WEIGHT))
                known[thin] = [self._rank, part.shape[1]], wide
                known[wide] = [part.shape[0], self._rank], thin
        lines = []
        for name, facts in self._facts.items():
            shape, other = known.get(name, (None, name))
            if shape is None:
                lines.append(f"extra: {name}")
            elif list(facts.shape) != shape:
                lines.append(f"{name} has shape {list(facts.shape)}, expected {shape}")
            if other not in self._facts:
                lines.append(f"missing: {other}")
        if lines or not self._facts:
            more = [f"and {len(lines) - MOST_LINES} more"] * (len(lines) > MOST_LINES)
            shown = "\n  ".join([*lines[:MOST_LINES], *more])
            raise InputError(
                f"{self.place}: its tensors are not adapters of the model's layers:\n  {shown}"
            )


def read_adapter_config(folder: Path) -> dict[str, Any]:
    """The content of adapter_config.json; InputError for what is no plain LoRA."""
    path = folder / CONFIG
    content = read_json(path, "the adapters'")
    if not isinstance(content, dict):
        raise InputError(f"{path}: expected an object in braces")
    odd = [f"{key} is {content[key]!r}, not {only!r}" for key, only in ONLY.items()
           if content.get(key, only) != only]  # fmt: skip
    odd += [f"{key} is {content[key]!r}" for key in WITHOUT if content.get(key)]
    if odd:
        raise InputError(f"{path}: only plain LoRA is read here: {first_few(odd)}")
    for key, kinds, expected in NUMBERS:
        value = content.get(key, PEFT_DEFAULT)
        is_number = isinstance(value, kinds) and not isinstance(value, bool)
        if not is_number or not 0 < value < MOST:
            raise InputError(f"{path}: {key} is {value!r}; expected {expected} above 0")
    base = content.get(BASE)
    if base is not None and not isinstance(base, str):
        raise InputError(f"{path}: {BASE} is {base!r}; expected a name")
    return content


def _items(
    adapters: Adapters, layer: str, theirs: list[str], split_rows: Any, sizes: Sizes
) -> list[Item]:
    thin, wide = (adapters.facts[f"{layer}.{part}{WEIGHT}"] for part in (A, B))
    items = []
    for index, (name, rows) in enumerate(zip(theirs, split_rows(wide, sizes), strict=True)):
        first, second = _names(name)
        items += [
            Item(name=first, shape=tuple(thin.shape), dtype=thin.dtype,
                 read=lambda: adapters.pair(layer)[0]),
            Item(name=second, shape=tuple(rows.shape), dtype=wide.dtype,
                 read=lambda index=index: split_rows(adapters.pair(layer)[1], sizes)[index]),
        ]  # fmt: skip
    return items


def _names(theirs: str) -> tuple[str, str]:
    """PEFT's names of A and B of a layer."""
    return f"{PREFIX}{theirs}.{A}{WEIGHT}", f"{PREFIX}{theirs}.{B}{WEIGHT}"


def _endings(name: str) -> list[str]:
    """A name's endings between dots, the shortest first."""
    parts = name.split(".")
    return [".".join(parts[-count:]) for count in range(1, len(parts) + 1)]
