"""LoRA's adapters as files hold them, and a model's weights with adapters merged into them.

W' = W + (alpha / rank) · B A        in fp32, one tensor at a time
"""

from collections.abc import Collection
from typing import Protocol

import torch
from torch import Tensor

from megatron_zpp.checkpoint.weight_source import WeightSource
from megatron_zpp.model.lora import A, B
from megatron_zpp.settings.config import LoraConfig
from zeropp.errors import InputError, first_few

WEIGHT = ".weight"
MOST_LINES = 40


class Changes(Protocol):
    """What is added to the weights of some layers, by our names of them; `place` is for errors."""

    place: str
    layers: Collection[str]

    def shape(self, layer: str) -> torch.Size:
        """Outputs and inputs of a layer."""

    def change(self, layer: str) -> Tensor:
        """What is added to its weight: fp32 [out, in]."""


class Adapters:
    """The adapters in a checkpoint, of layers that `layers` names.

    Raises InputError where there are none, or A without B.
    """

    def __init__(self, weights: WeightSource, config: LoraConfig, place: str) -> None:
        self.config, self.place, self._weights = config, place, weights
        self.facts = weights.facts()
        ending = f".{A}{WEIGHT}"
        self.layers = [fact.removesuffix(ending) for fact in self.facts if fact.endswith(ending)]
        alone = [layer for layer in self.layers if f"{layer}.{B}{WEIGHT}" not in self.facts]
        if not self.layers or alone:
            what = f"no {B} for {first_few(alone)}" if alone else "no adapters"
            raise InputError(f"{place}: {what}; expected a checkpoint of a run with --lora-rank")

    def shape(self, layer: str) -> torch.Size:
        """Outputs and inputs of a layer."""
        (_, inputs), (outputs, _) = (self.facts[name].shape for name in self._names(layer))
        return torch.Size((outputs, inputs))

    def pair(self, layer: str) -> tuple[Tensor, Tensor]:
        """A [rank, in] and B [out, rank] as they were saved."""
        thin, wide = (self._weights.read(name) for name in self._names(layer))
        return thin, wide

    def change(self, layer: str) -> Tensor:
        """What is added to its weight: fp32 [out, in]."""
        thin, wide = self.pair(layer)
        return wide.float() @ thin.float() * self.config.scaling

    def _names(self, layer: str) -> tuple[str, str]:
        return f"{layer}.{A}{WEIGHT}", f"{layer}.{B}{WEIGHT}"


class MergedWeights:
    """The weights of a model with changes added, all in fp32; read as a model's without.

    Raises InputError, which names them, for layers that the model lacks or has in another shape.
    """

    def __init__(self, base: WeightSource, changes: Changes) -> None:
        self._base, self._changes = base, changes
        facts = base.facts()
        lines = []
        for layer in changes.layers:
            expected, found = changes.shape(layer), facts.get(layer + WEIGHT)
            if found is None:
                lines.append(f"missing: {layer}{WEIGHT}")
            elif found.shape != expected:
                lines.append(
                    f"{layer}{WEIGHT} has shape {list(found.shape)}, expected {list(expected)}"
                )
        if lines:
            more = [f"and {len(lines) - MOST_LINES} more"] * (len(lines) > MOST_LINES)
            shown = "\n  ".join([*lines[:MOST_LINES], *more])
            raise InputError(f"{changes.place}: its adapters are of another model:\n  {shown}")
        self._facts = {
            name: one.to(torch.promote_types(one.dtype, torch.float32))
            for name, one in facts.items()
        }

    def facts(self) -> dict[str, Tensor]:
        """Every tensor's shape and dtype by name, as tensors on the meta device."""
        return dict(self._facts)

    def read(self, name: str) -> Tensor:
        """One whole tensor on the CPU, its adapter merged."""
        weight = self._base.read(name).to(self._facts[name].dtype)
        layer = name.removesuffix(WEIGHT)
        if name.endswith(WEIGHT) and layer in self._changes.layers:
            weight = weight + self._changes.change(layer)
        return weight
