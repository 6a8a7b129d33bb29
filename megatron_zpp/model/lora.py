"""LoRA: a trained low-rank product next to each frozen linear layer (Hu et al. 2021, section 4.1).

    y = W x + b + (alpha / rank) · B A dropout(x)        A [rank, in], B [out, rank]

B is initialized to zero, so the model starts unchanged. The frozen weights keep their names.
"""

import difflib
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_zpp.model.init import draw
from megatron_zpp.settings.config import LoraConfig
from zeropp.errors import InputError

A, B = "lora_A", "lora_B"  # PEFT's names


def adapt(layer: nn.Module, x: Tensor) -> Tensor:
    """Return what the adapter of a linear layer adds, [..., out], for x [..., in]."""
    projected = layer.lora_A(F.dropout(x, layer.lora.lora_dropout, layer.training))  # [..., rank]
    return layer.lora_B(projected) * layer.lora.scaling


def adapters_of(config: LoraConfig | None, layer: int, name: str) -> LoraConfig | None:
    """Return the configuration for a linear layer of a block if it has an adapter, or None.

    A target is a layer's name or its last components, as in PEFT; without targets all are.
    """
    if config is None or config.lora_target_modules is None:
        return config
    targets = config.lora_target_modules
    return config if any(_matches(each, f"blocks.{layer}.{name}") for each in targets) else None


def train_adapters_only(model: nn.Module, config: LoraConfig) -> None:
    """Freeze all weights of a model but its adapters.

    Raises InputError for a target that matches no layer, and suggests the nearest names.
    """
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_adapter(name))
    layers = {
        name.split(".", 2)[2]  # blocks.0.attention.qkv -> attention.qkv
        for name, module in model.blocks.named_modules(prefix="blocks")
        if isinstance(module, nn.Linear) and name.rpartition(".")[2] not in (A, B)
    }
    names = [
        f"blocks.{layer}.{each}" for layer in range(model.config.num_layers) for each in layers
    ]
    for target in config.lora_target_modules or ():
        if not any(_matches(target, name) for name in names):
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
