"""The LoRA adapters of a checkpoint, and a model's weights with adapters merged into them.

W' = W + (alpha / rank) · B A        in fp32, one tensor at a time (Hu et al. 2021)
"""

from collections.abc import Collection
from typing import Protocol

import torch
from torch import Tensor

from megatron_zpp.checkpoint.weight_source import WeightSource
from megatron_zpp.model.lora import A, B
from megatron_zpp.settings.config import LoraConfig
from zeropp.errors import InputError, first_few, first_lines

WEIGHT = ".weight"


class LoraAdapters(Protocol):
    """Adapters of some of a GPT's layers, by their names; errors name the `location`."""

    location: str
    layers: Collection[str]

    def weight_shape(self, layer: str) -> torch.Size:
        """Return the shape [out, in] of the layer's weight."""

    def weight_delta(self, layer: str) -> Tensor:
        """Return (alpha / rank) · B A of a layer, fp32 [out, in]."""


class CheckpointAdapters:
    """The adapters in a checkpoint, of the layers in `layers`.

    Raises InputError for a checkpoint without adapters, and for A without B.
    """

    def __init__(self, weights: WeightSource, config: LoraConfig, location: str) -> None:
        self.config, self.location, self._weights = config, location, weights
        self.facts = weights.facts()
        suffix = f".{A}{WEIGHT}"
        self.layers = [name.removesuffix(suffix) for name in self.facts if name.endswith(suffix)]
        if not self.layers:
            problem = "no adapters"
        else:
            incomplete = [
                layer for layer in self.layers if f"{layer}.{B}{WEIGHT}" not in self.facts
            ]
            problem = f"no {B} for {first_few(incomplete)}" if incomplete else None
        if problem:
            raise InputError(
                f"{location}: {problem}; expected a checkpoint of a run with --lora-rank"
            )

    def weight_shape(self, layer: str) -> torch.Size:
        """Return the shape [out, in] of the layer's weight."""
        lora_a, lora_b = (self.facts[name] for name in self._names(layer))
        return torch.Size((lora_b.shape[0], lora_a.shape[1]))

    def pair(self, layer: str) -> tuple[Tensor, Tensor]:
        """Return A [rank, in] and B [out, rank] as they were saved."""
        lora_a, lora_b = (self._weights.read(name) for name in self._names(layer))
        return lora_a, lora_b

    def weight_delta(self, layer: str) -> Tensor:
        """Return (alpha / rank) · B A of a layer, fp32 [out, in]."""
        lora_a, lora_b = self.pair(layer)
        return lora_b.float() @ lora_a.float() * self.config.scaling

    def _names(self, layer: str) -> tuple[str, str]:
        return f"{layer}.{A}{WEIGHT}", f"{layer}.{B}{WEIGHT}"


class MergedWeights:
    """The weights of a model with adapters merged, all in fp32, a `WeightSource`.

    Raises InputError, which lists them, for layers that the model lacks or has in another shape.
    """

    def __init__(self, base: WeightSource, adapters: LoraAdapters) -> None:
        self._base, self._adapters = base, adapters
        base_facts = base.facts()
        self._check(base_facts)
        self._facts = {
            name: tensor.to(torch.promote_types(tensor.dtype, torch.float32))
            for name, tensor in base_facts.items()
        }

    def facts(self) -> dict[str, Tensor]:
        """Return every tensor's shape and dtype by name, as tensors on the meta device."""
        return dict(self._facts)

    def read(self, name: str) -> Tensor:
        """Return one whole tensor on the CPU, with its adapter merged."""
        weight = self._base.read(name).to(self._facts[name].dtype)
        layer = name.removesuffix(WEIGHT)
        if name.endswith(WEIGHT) and layer in self._adapters.layers:
            weight = weight + self._adapters.weight_delta(layer)
        return weight

    def _check(self, base_facts: dict[str, Tensor]) -> None:
        lines = []
        for layer in self._adapters.layers:
            name, expected = layer + WEIGHT, self._adapters.weight_shape(layer)
            if name not in base_facts:
                lines.append(f"missing: {name}")
            elif base_facts[name].shape != expected:
                shape = list(base_facts[name].shape)
                lines.append(f"{name} has shape {shape}, expected {list(expected)}")
        if lines:
            raise InputError(
                f"{self._adapters.location}: its adapters are of another model:\n  "
                f"{first_lines(lines)}"
            )
