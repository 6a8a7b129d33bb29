"""LoRA: a trained low-rank product next to each frozen linear layer (Hu et al. 2021, section 4.1).

    y = W x + b + (alpha / rank) · B A dropout(x)        A [rank, in], B [out, rank]

B is initialized to zero, so the model starts unchanged. The frozen weights keep their names. A
matrix of all experts has an adapter for each of them, A [experts * rank, in], B [experts * out,
rank]. A layer that can have an adapter has an attribute `lora`: its configuration, or None.
"""

import difflib
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_zpp.model.init import draw
from megatron_zpp.settings.config import LoraConfig, ModelConfig
from zeropp.errors import InputError

A, B = "lora_A", "lora_B"  # PEFT's names
EXPERT_LAYERS = ("mlp.experts.gate", "mlp.experts.input", "mlp.experts.output")


def adapt(layer: nn.Module, x: Tensor, *counts: Tensor) -> Tensor:
    """Return what the adapter of a linear layer adds, [..., out], for x [..., in].

    counts: of rows for each expert, for a layer of experts.
    """
    dropped = F.dropout(x, layer.lora.lora_dropout, layer.training)
    projected = layer.lora_A(dropped, *counts)  # [..., rank]
    return layer.lora_B(projected, *counts) * layer.lora.scaling


def adapters_of(
    config: LoraConfig | None, layer: int, name: str, *, by_default: bool = True
) -> LoraConfig | None:
    """Return the configuration for a linear layer of a block if it has an adapter, or None.

    A target is a layer's name or its last components, as in PEFT. Without targets all layers have
    adapters that have them `by_default`.
    """
    if config is None or config.lora_target_modules is None:
        return config if by_default else None
    targets = config.lora_target_modules
    return config if any(_matches(each, f"blocks.{layer}.{name}") for each in targets) else None


def adapts_experts(config: LoraConfig, model: ModelConfig) -> bool:
    """Whether experts of a model have adapters."""
    return any(
        adapters_of(config, layer, name, by_default=False)
        for layer, has_experts in enumerate(model.moe_layers)
        for name in EXPERT_LAYERS
        if has_experts
    )


def train_adapters_only(model: nn.Module, config: LoraConfig) -> None:
    """Freeze all weights of a model, or of some of its layers, but the adapters.

    Raises InputError for a target that matches no layer of a whole model, and suggests the nearest
    names.
    """
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_adapter(name))
    if len(model.part.layers) < model.config.num_layers:  # the whole model has been checked
        return
    names = [
        name
        for name, module in model.blocks.named_modules(prefix="blocks")
        if hasattr(module, "lora") and name.rpartition(".")[2] not in (A, B)
    ]
    for target in config.lora_target_modules or ():
        if not any(_matches(target, name) for name in names):
            layers = {name.split(".", 2)[2] for name in names}  # without the number of the block
            raise InputError(_unknown_target(target, sorted(layers)))


@torch.no_grad()
def initialize_adapters(model: nn.Module, seed: int) -> None:
    """Draw A with the standard deviation of PEFT's U(-1/√in, 1/√in), and set B to zero.

    The same seed gives the same adapters on any number of ranks.
    """
    for name, parameter in model.named_parameters():
        if is_adapter(name):
            std = 1 / math.sqrt(3 * parameter.shape[1]) if f".{A}." in name else 0.0
            draw(parameter, f"{seed}/{name}", std)


def is_adapter(name: str) -> bool:
    """Whether a parameter of this name belongs to an adapter."""
    return f".{A}." in name or f".{B}." in name


def _matches(target: str, layer: str) -> bool:
    return layer == target or layer.endswith(f".{target}")


def _unknown_target(target: str, names: list[str]) -> str:
    nearest = difflib.get_close_matches(target, names, n=2, cutoff=0.3)
    hint = f" (did you mean {' or '.join(nearest)}?)" if nearest else ""
    return (
        f"--lora-target-modules {target} names no linear layer of the blocks{hint}: there are "
        f"{', '.join(names)}"
    )
