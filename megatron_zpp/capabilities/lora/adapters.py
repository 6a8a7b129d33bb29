"""LoRA: a trained low-rank product next to each frozen linear layer (Hu et al. 2021, section 4.1).

    y = W x + b + (alpha / rank) · B A dropout(x)        A [rank, in], B [out, rank]

B is initialized to zero, so the model starts unchanged. The frozen weights keep their names. A
matrix of all experts has an adapter for each of them, A [experts * rank, in], B [experts * out,
rank].
"""

import difflib
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_zpp.capabilities.lora.settings import A, B, LoraConfig
from megatron_zpp.model.delta import TakesDelta, is_of_delta
from megatron_zpp.model.gpt import GPT
from megatron_zpp.model.init import draw
from megatron_zpp.settings.gpt.model import ModelConfig
from zeropp.errors import InputError

EXPERT_LAYERS = ("mlp.experts.gate", "mlp.experts.input", "mlp.experts.output")


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """The `Delta` of LoRA, whose matrices are modules of the layer."""

    scaling: float
    dropout: float

    def term(self, layer: nn.Module, x: Tensor, *counts: Tensor) -> Tensor:
        """Return what is added to the layer's product, [..., out], for x [..., in]."""
        dropped = F.dropout(x, self.dropout, layer.training)
        projected = layer.lora_A(dropped, *counts)  # [..., rank]
        return layer.lora_B(projected, *counts) * self.scaling


def add_adapters(model: GPT, config: LoraConfig) -> GPT:
    """Add adapters to linear layers of a model, or of some of its layers; freeze all other weights.

    A target is a layer's name or its last components, as in PEFT. Without targets all layers get
    adapters that have them by default. Raises InputError for a target that matches no layer of a
    whole model, and suggests the nearest names.
    """
    layers = {
        name: module
        for name, module in model.blocks.named_modules(prefix="blocks")
        if isinstance(module, TakesDelta)
    }
    if len(model.part.layers) == model.config.num_layers:  # else the whole model has been checked
        _require_targets(config, layers)
    adapter = Adapter(scaling=config.scaling, dropout=config.lora_dropout)
    for name, layer in layers.items():
        if _is_target(config, name, layer):
            layer.take(adapter, dict(zip((A, B), layer.factors(config.lora_rank), strict=True)))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_of_delta(name))
    return model


def adapts_experts(config: LoraConfig, model: ModelConfig) -> bool:
    """Whether experts of a model have adapters."""
    return any(
        _matches(target, f"blocks.{layer}.{name}")
        for layer, has_experts in enumerate(model.moe_layers)
        for name in EXPERT_LAYERS
        for target in config.lora_target_modules or ()
        if has_experts
    )


@torch.no_grad()
def initialize_adapters(model: nn.Module, seed: int) -> None:
    """Draw A with the standard deviation of PEFT's U(-1/√in, 1/√in), and set B to zero.

    The same seed gives the same adapters on any number of ranks.
    """
    for name, parameter in model.named_parameters():
        if is_of_delta(name):
            std = 1 / math.sqrt(3 * parameter.shape[1]) if f".{A}." in name else 0.0
            draw(parameter, f"{seed}/{name}", std)


def _is_target(config: LoraConfig, name: str, layer: TakesDelta) -> bool:
    if config.lora_target_modules is None:
        return layer.by_default
    return any(_matches(target, name) for target in config.lora_target_modules)


def _matches(target: str, layer: str) -> bool:
    return layer == target or layer.endswith(f".{target}")


def _require_targets(config: LoraConfig, layers: dict[str, TakesDelta]) -> None:
    for target in config.lora_target_modules or ():
        if not any(_matches(target, name) for name in layers):
            # Without the number of the block.
            names = sorted({name.split(".", 2)[2] for name in layers})
            nearest = difflib.get_close_matches(target, names, n=2, cutoff=0.3)
            hint = f" (did you mean {' or '.join(nearest)}?)" if nearest else ""
            raise InputError(
                f"--lora-target-modules {target} names no linear layer of the blocks{hint}: there "
                f"are {', '.join(names)}"
            )
