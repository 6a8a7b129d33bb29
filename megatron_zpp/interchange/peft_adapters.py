"""PEFT's folders of LoRA adapters: adapter_config.json and adapter_model.safetensors.

Queries, keys and values are one layer in our model and may be several in Hugging Face's. These are
written with the same A, each with its own rows of B. Adapters that are read may have an A for each;
they can only be merged into the weights.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from megatron_zpp.checkpoint.safetensors_files import SUFFIX, Item, write_safetensors
from megatron_zpp.interchange.converted_weights import joined_parts, parameter_shapes, split_by_name
from megatron_zpp.interchange.families.forms import Sizes
from megatron_zpp.interchange.families.names import NameRow, NameTable
from megatron_zpp.interchange.families.settings import MAX_NUMBER
from megatron_zpp.interchange.hf_folder import FolderTensors, write_json
from megatron_zpp.interchange.lora_adapters import WEIGHT, CheckpointAdapters
from megatron_zpp.model.lora import A, B
from megatron_zpp.tokenizer.base import read_json
from zeropp.errors import InputError, first_few, first_lines

CONFIG = "adapter_config.json"
TENSORS = f"adapter_model{SUFFIX}"
BASE = "base_model_name_or_path"
DEFAULT_NUMBER = 8  # PEFT's default of r and of lora_alpha
NUMBERS = (("r", int, "a whole number"), ("lora_alpha", int | float, "a number"))
PREFIX = "base_model.model."  # of names, from PEFT's wrapper modules
# Variants of LoRA that PEFT supports, and that W + (alpha / rank) · B A would not reproduce.
REQUIRED: Mapping[str, Any] = MappingProxyType({"peft_type": "LORA", "bias": "none"})
UNSUPPORTED = (
    "use_dora",
    "lora_bias",
    "modules_to_save",
    "rank_pattern",
    "alpha_pattern",
    "layer_replication",
    "target_parameters",
    "trainable_token_indices",
    "alora_invocation_tokens",
)


def is_peft(folder: Path) -> bool:
    """Whether a folder holds adapters of PEFT's."""
    return (folder / CONFIG).is_file()


def write_peft(
    output: Path,
    adapters: CheckpointAdapters,
    table: NameTable,
    sizes: Sizes,
    base_name: str,
    dtype: torch.dtype | None = None,
) -> list[Path]:
    """Write adapters as a PEFT folder, adapter_config.json last; returns the files.

    `base_name` is what PEFT opens as the base model; dtype None keeps each tensor's. Raises
    InputError for a folder that holds adapters already, and for adapters that PEFT would take for
    those of experts.
    """
    if is_peft(output) or (output / TENSORS).exists():
        raise InputError(f"--to-peft {output} holds adapters already: name another folder")
    num_experts = sizes.model.num_experts
    _require_no_experts(adapters.layers, sizes)
    rows = {layer: table.row(layer + WEIGHT, num_experts) for layer in adapters.layers}
    _require_own_modules(rows)
    items = []
    for layer, row in rows.items():
        items += _items(adapters, layer, row, sizes)
    if dtype is not None:
        items = [replace(item, dtype=dtype) for item in items]
    adapted = [module for row in rows.values() for module in _module_names(row)]
    modules = [
        module
        for parameter in parameter_shapes(sizes.model, sizes.padded_rows)
        for module in _module_names(table.row(parameter, num_experts))
    ]
    lora = adapters.config
    content = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        BASE: base_name,
        "r": lora.lora_rank,
        "lora_alpha": int(lora.lora_alpha) if lora.lora_alpha % 1 == 0 else lora.lora_alpha,
        "lora_dropout": lora.lora_dropout,
        "target_modules": target_modules(adapted, modules),
        "fan_in_fan_out": any(row.form.is_transposed for row in rows.values()),
        "bias": "none",
        "modules_to_save": None,
        "inference_mode": True,
    }
    output.mkdir(parents=True, exist_ok=True)
    paths = write_safetensors(output / TENSORS, items, {"format": "pt"})
    write_json(output / CONFIG, content)
    return [*paths, output / CONFIG]


def target_modules(adapted: Sequence[str], modules: Sequence[str]) -> list[str]:
    """Return the shortest suffixes of names that match all `adapted` modules and no others."""
    others = set(modules) - set(adapted)
    excluded = {suffix for name in others for suffix in _suffixes(name)}
    targets = {
        next(suffix for suffix in _suffixes(name) if suffix not in excluded) for name in adapted
    }
    return sorted(targets)


def _require_no_experts(layers: Sequence[str], sizes: Sizes) -> None:
    """Raise InputError for layers whose names PEFT takes for those of experts.

    In transformers 5 experts are parameters, to which PEFT applies adapters of `gate_proj`,
    `up_proj` and `down_proj`, whatever module these are in.
    """
    in_mlps = [layer for layer in layers if ".mlp." in layer]
    if sizes.model.has_experts and in_mlps:
        raise InputError(
            f"--to-peft: PEFT would take the adapters of {first_few(in_mlps)} for adapters of "
            "experts: --to-hf writes the model with all adapters merged"
        )


class PeftAdapters:
    """The adapters of a PEFT folder by the names of our GPT's layers.

    Raises InputError for a damaged folder, for anything beyond plain LoRA, and for tensors that are
    not adapters of the model's layers, which it lists.
    """

    def __init__(self, folder: Path, table: NameTable, sizes: Sizes) -> None:
        self.location, self._sizes = str(folder), sizes
        content = read_peft_config(folder)
        self._rank = content.get("r", DEFAULT_NUMBER)
        alpha = content.get("lora_alpha", DEFAULT_NUMBER)
        divisor = math.sqrt(self._rank) if content.get("use_rslora") else float(self._rank)
        self._scaling = alpha / divisor
        self._tensors = FolderTensors(folder, TENSORS)
        self._facts = self._tensors.facts()
        self._weights = {  # the weights that can have adapters, on the meta device
            name.removesuffix(WEIGHT): parameter
            for name, parameter in parameter_shapes(sizes.model, sizes.padded_rows).items()
            if name.startswith("blocks.") and parameter.ndim == 2
        }
        num_experts = sizes.model.num_experts
        self._rows = {layer: table.row(layer + WEIGHT, num_experts) for layer in self._weights}
        tensors = split_by_name(self._weights, self._rows, sizes)
        self._shapes = {
            name.removesuffix(WEIGHT): joined_parts(parts).shape for name, parts in tensors.items()
        }
        self._check()
        self.layers = [layer for layer, row in self._rows.items() if self._has_adapter(row)]

    def weight_shape(self, layer: str) -> torch.Size:
        """Return the shape [out, in] of the layer's weight."""
        return self._weights[layer].shape

    def weight_delta(self, layer: str) -> Tensor:
        """Return what the adapters add to the layer's weight, fp32 [out, in]."""
        row = self._rows[layer]
        deltas = [
            self._module_delta(module, self._shapes[module], row.form.is_transposed)
            for module in _module_names(row)
        ]
        return row.form.join(deltas, self._sizes).contiguous()

    def _module_delta(self, module: str, shape: torch.Size, is_transposed: bool) -> Tensor:
        names = _adapter_names(module)
        if names[0] not in self._facts:
            return torch.zeros(shape)
        lora_a, lora_b = (self._tensors.read(name).float() for name in names)
        delta = lora_b @ lora_a * self._scaling
        return delta.T if is_transposed else delta

    def _has_adapter(self, row: NameRow) -> bool:
        return any(_adapter_names(module)[0] in self._facts for module in _module_names(row))

    def _check(self) -> None:
        expected_shapes: dict[str, list[int]] = {}
        partners: dict[str, str] = {}  # A's name by B's, and B's by A's
        for row in self._rows.values():
            for module in _module_names(row):
                shape = self._shapes[module]
                num_rows, num_columns = reversed(shape) if row.form.is_transposed else shape
                name_a, name_b = _adapter_names(module)
                expected_shapes[name_a] = [self._rank, num_columns]
                expected_shapes[name_b] = [num_rows, self._rank]
                partners[name_a] = name_b
                partners[name_b] = name_a
        lines = []
        for name, facts in self._facts.items():
            if name not in expected_shapes:
                lines.append(f"extra: {name}")
                continue
            shape, expected = list(facts.shape), expected_shapes[name]
            if shape != expected:
                lines.append(f"{name} has shape {shape}, expected {expected}")
            if partners[name] not in self._facts:
                lines.append(f"missing: {partners[name]}")
        if lines or not self._facts:
            raise InputError(
                f"{self.location}: its tensors are not adapters of the model's layers:\n  "
                f"{first_lines(lines)}"
            )


def read_peft_config(folder: Path) -> dict[str, Any]:
    """Return the content of adapter_config.json; raises InputError for anything but plain LoRA."""
    path = folder / CONFIG
    content = read_json(path, "the adapters'")
    problems = [
        f"{key} is {content[key]!r}, not {required!r}"
        for key, required in REQUIRED.items()
        if content.get(key, required) != required
    ]
    problems += [f"{key} is {content[key]!r}" for key in UNSUPPORTED if content.get(key)]
    if problems:
        raise InputError(f"{path}: only plain LoRA is supported: {first_few(problems)}")
    for key, types, expected in NUMBERS:
        value = content.get(key, DEFAULT_NUMBER)
        is_number = isinstance(value, types) and not isinstance(value, bool)
        if not is_number or not 0 < value < MAX_NUMBER:
            raise InputError(f"{path}: {key} is {value!r}; expected {expected} above 0")
    base = content.get(BASE)
    if base is not None and not isinstance(base, str):
        raise InputError(f"{path}: {BASE} is {base!r}; expected a name")
    return content


def _require_own_modules(rows: Mapping[str, NameRow]) -> None:
    """Raise InputError for adapters of a layer that is a part of one in Hugging Face's model."""
    for layer, row in rows.items():
        if row.form.place is not None:
            (module,) = _module_names(row)
            raise InputError(
                f"--to-peft: {layer} is a part of Hugging Face's layer {module}, for which PEFT "
                "has one adapter: merge the adapters into the model, --to-hf"
            )


def _items(adapters: CheckpointAdapters, layer: str, row: NameRow, sizes: Sizes) -> list[Item]:
    facts_a, facts_b = (adapters.facts[f"{layer}.{factor}{WEIGHT}"] for factor in (A, B))

    def read_a() -> Tensor:
        return adapters.pair(layer)[0]

    def read_b(index: int) -> Tensor:
        return row.form.split_rows(adapters.pair(layer)[1], sizes)[index]

    items = []
    parts = row.form.split_rows(facts_b, sizes)
    for index, (module, part) in enumerate(zip(_module_names(row), parts, strict=True)):
        name_a, name_b = _adapter_names(module)
        items += [
            Item(name=name_a, shape=tuple(facts_a.shape), dtype=facts_a.dtype, read=read_a),
            Item(
                name=name_b,
                shape=tuple(part.shape),
                dtype=facts_b.dtype,
                read=partial(read_b, index),
            ),
        ]
    return items


def _module_names(row: NameRow) -> list[str]:
    """Return Hugging Face's modules whose weights are in a row; none for a bias."""
    return [name.removesuffix(WEIGHT) for name in row.hf_names if name.endswith(WEIGHT)]


def _adapter_names(module: str) -> tuple[str, str]:
    """Return PEFT's names of the A and B of one of Hugging Face's modules."""
    return f"{PREFIX}{module}.{A}{WEIGHT}", f"{PREFIX}{module}.{B}{WEIGHT}"


def _suffixes(name: str) -> list[str]:
    """Return the suffixes of a name that begin after a dot, the shortest first, the name last."""
    parts = name.split(".")
    return [".".join(parts[-count:]) for count in range(1, len(parts) + 1)]
