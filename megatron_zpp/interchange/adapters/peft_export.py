"""Writes adapters for PEFT: adapter_config.json and adapter_model.safetensors.

Queries, keys and values, which are one layer in our model and may be several in Hugging Face's, are
written with the same A, each with its own rows of B. `fused_parameters.py` says which are written
as those of parameters, and which modules are named by their weights.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from megatron_zpp.capabilities.lora.merged_weights import WEIGHT, CheckpointAdapters
from megatron_zpp.capabilities.lora.settings import A, B
from megatron_zpp.checkpoint.safetensors_files import Item, write_safetensors
from megatron_zpp.checkpoint.weight_source import parameter_shapes
from megatron_zpp.interchange.adapters.fused_parameters import (
    LAYOUT_VERSION,
    NAME_PARTS,
    FusedParameter,
    fused_layers,
    fused_parameters,
    is_fused,
    named_by_weight,
)
from megatron_zpp.interchange.adapters.peft_adapters import adapter_names, is_peft, module_names
from megatron_zpp.interchange.adapters.peft_config import (
    BASE,
    CONFIG,
    TENSORS,
    shortest_suffixes,
)
from megatron_zpp.interchange.families.forms import Sizes
from megatron_zpp.interchange.families.names import NameRow, NameTable
from megatron_zpp.interchange.hf_folder import write_json
from zeropp.errors import InputError


@dataclass(frozen=True, kw_only=True)
class _Targets:
    """What PEFT adapts: modules, parameters, and those parameters whose rank is a multiple."""

    modules: list[str]
    parameters: list[str]
    multiples: Mapping[str, int]


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
    InputError for a folder that holds adapters already, and for adapters that PEFT cannot express.
    """
    if is_peft(output) or (output / TENSORS).exists():
        raise InputError(f"--to-peft {output} holds adapters already: name another folder")
    model = sizes.model
    plain = [layer for layer in adapters.layers if not is_fused(layer)]
    rows = {layer: table.row(layer + WEIGHT, model) for layer in plain}
    _require_own_modules(rows)
    fused = fused_layers(adapters.layers, table, sizes.model)
    items = []
    for layer, row in rows.items():
        items += _items(adapters, layer, row, sizes)
    for parameter, layers in fused.items():
        items += _fused_items(adapters, parameter, layers, [*fused])
    if dtype is not None:
        items = [replace(item, dtype=dtype) for item in items]
    targets = _targets(rows, fused, table, sizes)
    lora = adapters.config
    alpha = int(lora.lora_alpha) if lora.lora_alpha % 1 == 0 else lora.lora_alpha
    content = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        BASE: base_name,
        "r": lora.lora_rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0 if targets.parameters else lora.lora_dropout,  # PEFT has none for them
        "target_modules": targets.modules,
        "fan_in_fan_out": any(row.form.is_transposed for row in rows.values()),
        "bias": "none",
        "modules_to_save": None,
        "inference_mode": True,
    }
    if targets.parameters:
        content |= {"target_parameters": targets.parameters, "peft_version": LAYOUT_VERSION}
        patterns = {re.escape(name): number for name, number in targets.multiples.items()}
        content["rank_pattern"] = {key: n * lora.lora_rank for key, n in patterns.items()}
        content["alpha_pattern"] = {key: n * alpha for key, n in patterns.items()}
    output.mkdir(parents=True, exist_ok=True)
    paths = write_safetensors(output / TENSORS, items, {"format": "pt"})
    write_json(output / CONFIG, content)
    return [*paths, output / CONFIG]


def _targets(
    rows: Mapping[str, NameRow],
    fused: Mapping[FusedParameter, Sequence[str]],
    table: NameTable,
    sizes: Sizes,
) -> _Targets:
    model = sizes.model
    adapted = [module for row in rows.values() for module in module_names(row)]
    all_modules = [
        module
        for parameter in parameter_shapes(model, sizes.padded_rows)
        for module in module_names(table.row(parameter, model))
    ]
    by_weight = named_by_weight(model, adapted)
    by_name = [module for module in adapted if module not in by_weight]
    weights = [module + WEIGHT for module in by_weight]
    parameters = shortest_suffixes(weights, [module + WEIGHT for module in all_modules], 2)
    all_fused = [each.target for each in fused_parameters(model, table)] if fused else []
    multiples: dict[str, int] = {}
    for number in (1, 2):
        names = [each.target for each, layers in fused.items() if len(layers) == number]
        suffixes = shortest_suffixes(names, all_fused, NAME_PARTS)
        parameters += suffixes
        if number > 1:
            multiples |= dict.fromkeys(suffixes, number)
    return _Targets(
        modules=shortest_suffixes(by_name, all_modules),
        parameters=sorted(parameters),
        multiples=multiples,
    )


def _require_own_modules(rows: Mapping[str, NameRow]) -> None:
    """Raise InputError for adapters of a layer that is a part of one in Hugging Face's model."""
    for layer, row in rows.items():
        if row.form.place is not None:
            (module,) = module_names(row)
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
    for index, (module, part) in enumerate(zip(module_names(row), parts, strict=True)):
        name_a, name_b = adapter_names(module)
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


def _fused_items(
    adapters: CheckpointAdapters,
    parameter: FusedParameter,
    layers: Sequence[str],
    all_adapted: Sequence[FusedParameter],
) -> list[Item]:
    """Return A and B of a parameter of which `layers` have adapters."""
    in_module = [each for each in all_adapted if each.module == parameter.module]
    names = adapter_names(parameter.wrapper(in_module))
    rank = adapters.config.lora_rank * len(layers)
    dtype = adapters.facts[f"{layers[0]}.{A}{WEIGHT}"].dtype

    def read_a() -> Tensor:
        return parameter.joined_a([adapters.pair(layer)[0] for layer in layers])

    def read_b() -> Tensor:
        return parameter.joined_b({layer: adapters.pair(layer)[1] for layer in layers})

    return [
        Item(name=name, shape=tuple(shape), dtype=dtype, read=read)
        for name, shape, read in zip(names, parameter.shapes(rank), (read_a, read_b), strict=True)
    ]
