"""LoRA: a trained low-rank product beside each frozen linear layer (Hu et al. 2021, section 4.1).

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


class LoraLinear(nn.Linear):
    """A linear layer with an adapter; `lora_A` and `lora_B` are linear layers without biases."""

    def __init__(self, base: nn.Linear, config: LoraConfig) -> None:
        factory = {"device": base.weight.device, "dtype": base.weight.dtype}
        super().__init__(base.in_features, base.out_features, base.bias is not None, **factory)
        self.weight, self.bias = base.weight, base.bias
        self.lora_A = nn.Linear(base.in_features, config.lora_rank, bias=False, **factory)
        self.lora_B = nn.Linear(config.lora_rank, base.out_features, bias=False, **factory)
        self.scaling = config.scaling
        self.lora_dropout = config.lora_dropout

    def forward(self, x: Tensor) -> Tensor:
        """Map x [..., in] to [..., out]."""
        return super().forward(x) + self.adapt(x)

    def adapt(self, x: Tensor) -> Tensor:
        """Return what the adapter adds, [..., out]."""
        projected = self.lora_A(F.dropout(x, self.lora_dropout, self.training))  # [..., rank]
        return self.lora_B(projected) * self.scaling


def add_lora(model: nn.Module, config: LoraConfig) -> tuple[str, ...]:
    """Freeze a model and add adapters to the layers that the configuration names, in place.

    Returns the names of those layers. A target is a layer's name or its last components, as in
    PEFT. Raises InputError for a target that matches no layer, and suggests the nearest names.
    """
    layers = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and name.startswith("blocks.")
    }
    targets = config.lora_target_modules or tuple(layers)
    for target in targets:
        if not any(_matches(target, name) for name in layers):
            raise InputError(_unknown_target(target, layers))
    adapted = [name for name in layers if any(_matches(target, name) for target in targets)]
    model.requires_grad_(False)
    for name in adapted:
        parent_name, _, child_name = name.rpartition(".")
        parent = model.get_submodule(parent_name)
        setattr(parent, child_name, LoraLinear(layers[name], config))
    return tuple(adapted)


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


def _unknown_target(target: str, layers: dict[str, nn.Linear]) -> str:
    # blocks.0.attention.qkv -> attention.qkv
    names = sorted({layer.split(".", 2)[2] for layer in layers})
    nearest = difflib.get_close_matches(target, names, n=2, cutoff=0.3)
    hint = f" (did you mean {' or '.join(nearest)}?)" if nearest else ""
    return (
        f"--lora-target-modules {target} names no linear layer of the blocks{hint}: there are "
        f"{', '.join(names)}"
    )
