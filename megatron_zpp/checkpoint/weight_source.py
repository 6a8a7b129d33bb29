"""Where a GPT's weights come from, whatever files they are in, and how a model is filled."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from megatron_zpp.model.delta import is_of_delta
from megatron_zpp.model.gpt import GPT
from megatron_zpp.model.init import local_ranges
from megatron_zpp.settings.config import ModelConfig
from zeropp.checkpoint import names_elsewhere, shape_differences
from zeropp.errors import InputError, first_lines
from zeropp.optim import local_part


class WeightSource(Protocol):
    """Weights by the names of a GPT's parameters, read one tensor at a time.

    Between two calls a source holds no more memory than one tensor needs.
    """

    def facts(self) -> dict[str, Tensor]:
        """Every tensor's shape and dtype by name, as tensors on the meta device."""

    def read(self, name: str) -> Tensor:
        """One whole tensor on the CPU, in the dtype of the file."""


@dataclass(frozen=True, kw_only=True)
class AdamState:
    """Adam's moments, exp_avg and exp_avg_sq, by the parameters' names, after `step` updates."""

    moments: Mapping[str, WeightSource]
    step: float

    def facts(self) -> dict[str, Tensor]:
        """Every tensor's shape and dtype by <parameter>.<state>, on the meta device."""
        facts = {
            f"{name}.{key}": torch.empty_like(fact, dtype=torch.float32)
            for key, source in self.moments.items()
            for name, fact in source.facts().items()
        }
        names = dict.fromkeys(name for source in self.moments.values() for name in source.facts())
        return facts | {f"{name}.step": torch.empty((), device="meta") for name in names}

    def read(self, name: str) -> Tensor:
        """One whole tensor in fp32 on the CPU, by <parameter>.<state>."""
        parameter, _, key = name.rpartition(".")
        if key == "step":
            return torch.tensor(float(self.step))
        return self.moments[key].read(parameter).float()


@torch.no_grad()
def fill_parameters(model: nn.Module, weights: WeightSource) -> None:
    """Copy weights into all parameters and buffers of a model but those of deltas.

    They are cast to the dtypes there. The memory must be allocated. Parameters are plain tensors,
    or DTensors placed by Shard and Replicate, whose local part alone is written; each rank reads
    for itself. Raises InputError, before anything is written, if names or shapes of parameters and
    weights differ.
    """
    named = (*model.named_parameters(), *model.named_buffers())
    parameters = {name: tensor for name, tensor in named if not is_of_delta(name)}
    lines = shape_differences(parameters, weights.facts(), names_elsewhere(model))
    if lines:
        raise InputError(f"the weights are not those of the model:\n  {first_lines(lines)}")
    for name, parameter in parameters.items():
        local = tuple(slice(start, end) for start, end in local_ranges(parameter))
        local_part(parameter).copy_(weights.read(name)[local])


def parameter_shapes(
    model: ModelConfig, padded_rows: int, extend: Callable[[GPT], object] | None = None
) -> dict[str, Tensor]:
    """Return the parameters and buffers of a GPT on the meta device.

    It has `padded_rows` rows of vocabulary, and what `extend` adds to it.
    """
    with torch.device("meta"):
        gpt = GPT(model, padded_rows)
        if extend is not None:
            extend(gpt)
    assert gpt.padded_vocab_size == padded_rows
    named = (*gpt.named_parameters(), *gpt.named_buffers())
    return {name: tensor.detach() for name, tensor in named}
