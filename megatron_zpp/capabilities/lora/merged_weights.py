"""The LoRA adapters of a checkpoint, and a model's weights with adapters merged into them.

W' = W + (alpha / rank) · B A        in fp32, one tensor at a time (Hu et al. 2021)

The matrices of all experts have an A [experts * rank, in] and a B [experts * out, rank].
"""

from collections.abc import Collection, Mapping
from typing import Protocol

import torch
from torch import Tensor

from megatron_zpp.capabilities.lora.settings import A, B, LoraConfig
from megatron_zpp.checkpoint.weight_source import WeightSource
from zeropp.checkpoint import shape_differences
from zeropp.errors import InputError, first_lines

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

    `expected` are those that a run of this configuration has. Raises InputError for a checkpoint
    without adapters, and for other ones, which it lists.
    """

    def __init__(
        self,
        weights: WeightSource,
        config: LoraConfig,
        location: str,
        expected: Mapping[str, Tensor],
    ) -> None:
        self.config, self.location, self._weights = config, location, weights
        self.facts = weights.facts()
        if not self.facts:
            raise InputError(
                f"{location}: no adapters; expected a checkpoint of a run with --lora-rank"
            )
        lines = shape_differences(expected, self.facts)
        if lines:
            raise InputError(
                f"{location}: its adapters are not those of its settings:\n  {first_lines(lines)}"
            )
        suffix = f".{A}{WEIGHT}"
        self.layers = [name.removesuffix(suffix) for name in self.facts if name.endswith(suffix)]

    def weight_shape(self, layer: str) -> torch.Size:
        """Return the shape [out, in] of the layer's weight."""
        lora_a, lora_b = (self.facts[name] for name in self._names(layer))
        return torch.Size((lora_b.shape[0], lora_a.shape[1]))

    def pair(self, layer: str) -> tuple[Tensor, Tensor]:
        """Return A [rank, in] and B [out, rank], of experts those of all, as they were saved."""
        lora_a, lora_b = (self._weights.read(name) for name in self._names(layer))
        return lora_a, lora_b

    def weight_delta(self, layer: str) -> Tensor:
        """Return (alpha / rank) · B A of a layer, fp32 [out, in]."""
        lora_a, lora_b = (factor.float() for factor in self.pair(layer))
        rank = self.config.lora_rank
        if len(lora_a) == rank:
            return lora_b @ lora_a * self.config.scaling
        num = len(lora_a) // rank  # experts
        product = lora_b.unflatten(0, (num, -1)) @ lora_a.unflatten(0, (num, rank))
        return product.flatten(0, 1) * self.config.scaling

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
