"""LoRA: beside frozen linear layers, products of two thin trained ones (Hu et al. 2021).

    y = W x + b + (alpha / rank) · B A dropout(x)        A [rank, in], B [out, rank]

B begins with zeros, so the model begins as it was. Names of the frozen weights do not change.
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
    """A linear layer with an adapter; `lora_A` and `lora_B` are layers without biases."""

    def __init__(self, base: nn.Linear, config: LoraConfig) -> None:
        place = {"device": base.weight.device, "dtype": base.weight.dtype}
        super().__init__(base.in_features, base.out_features, base.bias is not None, **place)
        self.weight, self.bias = base.weight, base.bias
        self.lora_A = nn.Linear(base.in_features, config.lora_rank, bias=False, **place)
        self.lora_B = nn.Linear(config.lora_rank, base.out_features, bias=False, **place)
        self.scaling = config.scaling
        self.lora_dropout = config.lora_dropout

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] → [..., out]."""
        thin = self.lora_A(F.dropout(x, self.lora_dropout, self.training))
        return super().forward(x) + self.lora_B(thin) * self.scaling


def add_lora(model: nn.Module, config: LoraConfig) -> tuple[str, ...]:
    """Freeze a model and put adapters into the layers that the configuration names, in place.

    Returns those layers' names. A target is a layer's name or the end of it, as in PEFT. Raises
    InputError for one that names none, with the nearest there are.
    """
    layers = {name: one for name, one in model.named_modules() if isinstance(one, nn.Linear)}
    layers = {name: one for name, one in layers.items() if name.startswith("blocks.")}
    targets = config.lora_target_modules or tuple(layers)
    chosen = [name for name in layers if any(_names(target, name) for target in targets)]
    for target in targets:
        if not any(_names(target, name) for name in chosen):
            raise InputError(_no_such(target, sorted({_ending(name) for name in layers})))
    model.requires_grad_(False)
    for name in chosen:
        parent, _, own = name.rpartition(".")
        setattr(model.get_submodule(parent), own, LoraLinear(layers[name], config))
    return tuple(chosen)


@torch.no_grad()
def initialize_adapters(model: nn.Module, seed: int) -> None:
    """Draw A as PEFT does, with the standard deviation of U(-1/√in, 1/√in), and clear B.

    The same seed gives the same adapters on any number of ranks.
    """
    for name, parameter in model.named_parameters():
        if is_adapter(name):
            std = 1 / math.sqrt(3 * parameter.shape[1]) if f".{A}." in name else 0.0
            draw(parameter, f"{seed}/{name}", std)


def is_adapter(name: str) -> bool:
    """Whether a parameter of this name is an adapter's."""
    return f".{A}." in name or f".{B}." in name


def _names(target: str, layer: str) -> bool:
    return layer == target or layer.endswith(f".{target}")


def _ending(layer: str) -> str:
    """A layer's name within its block: attention.qkv."""
    return layer.split(".", 2)[2]


def _no_such(target: str, known: list[str]) -> str:
    nearest = difflib.get_close_matches(target, known, n=2, cutoff=0.3)
    hint = f" (did you mean {' or '.join(nearest)}?)" if nearest else ""
    return (
        f"--lora-target-modules {target} names no linear layer of the blocks{hint}: there are "
        f"{', '.join(known)}"
    )
