"""Mixtures of experts in Megatron's checkpoints: arguments, tensors and states.

All experts of a layer are in one tensor, with the experts in front, also where files have them
apart.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from megatron_zpp.interchange.foreign.megatron_args import table
from megatron_zpp.interchange.foreign.tensor_files import LazyTensor
from megatron_zpp.settings.config import ModelConfig
from zeropp.errors import InputError, first_few

DENSE = (0, 1, [1], (1,))  # numbers of experts
# A matrix or bias of one expert: of Megatron's experts that run one after another, those of
# torch_dist files that are apart, and grouped ones of Transformer Engine.
ONE_EXPERT = re.compile(
    r"(?P<layer>decoder\.layers\.\d+\.mlp\.experts\.)"
    r"(?:(?:local_)?experts\.(?P<number>\d+)\.(?P<linear>linear_fc[12]\.(?:weight|bias))"
    r"|(?P<grouped>linear_fc[12]\.(?:weight|bias))(?P<last>\d+))"
)
OF_EXPERTS = ("mlp.experts.experts.linear_fc1", "mlp.experts.experts.linear_fc2")
OF_SHARED = ("mlp.shared_experts.linear_fc1", "mlp.shared_experts.linear_fc2")


def read(fields: dict[str, Any], location: str) -> dict[str, Any]:
    """Return the fields without a number of experts that means none; InputError for several."""
    if (number := fields.get("num_experts")) in DENSE:
        return {name: value for name, value in fields.items() if name != "num_experts"}
    if isinstance(number, list | tuple):  # Megatron-DeepSpeed has one number or several
        raise InputError(f"{location}: --num-experts is {number!r}: experts of DeepSpeed")
    return fields


def written(model: ModelConfig) -> dict[str, Any]:
    """Return Megatron's arguments for experts."""
    if not model.has_experts:
        return {}
    return {name: getattr(model, name) for name in table()["fields"]["of_experts"]} | {
        "moe_layer_freq": 1 if all(model.moe_layers) else list(map(int, model.moe_layers)),
        "moe_ffn_hidden_size": model.expert_ffn_size,
        "expert_model_parallel_size": 1,
        "expert_tensor_parallel_size": 1,
    }


def missing(model: ModelConfig) -> list[str]:
    """Return the settings of a model that Megatron-LM has nothing like."""
    lines, best = [], model.moe_router_group_best
    if (
        model.moe_router_num_groups
        and model.group_best != replace(model, moe_router_group_best=None).group_best
    ):
        lines.append(f"--moe-router-group-best {best}")
    if model.moe_shared_expert_intermediate_size and not model.disable_bias_linear:
        lines.append("biases beside --moe-shared-expert-intermediate-size")
    return lines


def second_name(core: str, model: ModelConfig, layer: int) -> list[str]:
    """Return another name in a torch_dist checkpoint: of the normalization before experts.

    Transformer Engine's layers have it by itself, megatron-core's own layers as before an MLP.
    """
    return [core] if model.moe_layers[layer] and ".pre_mlp_layernorm." in core else []


def states(model: ModelConfig, layer: int, shard: str, is_stacked: bool) -> list[tuple[str, str]]:
    """Return the modules in a layer's MLP that have states, and the numbers of their shards."""
    if not model.moe_layers[layer]:
        return []
    shared = OF_SHARED if model.moe_shared_expert_intermediate_size else ()
    before, behind = (f"{layer}.", f"{model.num_layers}.") if is_stacked else ("", "")
    return [(module, shard) for module in shared] + [
        (module, f"{before}{expert}_{behind}{model.num_experts}")
        for expert in range(model.num_experts)
        for module in OF_EXPERTS
    ]


def joined_experts(tensors: Mapping[str, LazyTensor], where: str) -> dict[str, LazyTensor]:
    """Join the experts of a layer, with the experts in front, where each has tensors of its own.

    Raises InputError if some are missing or of other sizes.
    """
    joined: dict[str, LazyTensor] = {}
    apart: dict[str, dict[int, LazyTensor]] = {}
    for name, tensor in tensors.items():
        match = ONE_EXPERT.fullmatch(name)
        if match is None:
            joined[name] = tensor
            continue
        number = int(match["number"] or match["last"])
        whole = f"{match['layer']}experts.{match['linear'] or match['grouped']}"
        apart.setdefault(whole, {})[number] = tensor
    for name, by_number in apart.items():
        if sorted(by_number) != list(range(len(by_number))) or name in joined:
            raise InputError(
                f"{where}: {name}: has experts {first_few(list(map(str, sorted(by_number))))}, and "
                "others are missing, or all of them are there twice"
            )
        parts = [by_number[number] for number in range(len(by_number))]
        try:
            with_axis = [part.view(torch.Size([1, *part.fact.shape])) for part in parts]
            joined[name] = LazyTensor.cat(with_axis, 0)
        except ValueError as error:
            raise InputError(f"{where}: {name}: {error}") from error
    return joined


READS, WRITES, MISSING = (read,), (written,), (missing,)
PATTERNS = ("moe_layer_freq",)
LAYERS = (lambda model: model.moe_layers,)
NAMES, STATES, JOINS = (second_name,), (states,), (joined_experts,)
