"""Where a GPT's weights come from, whatever files they are in, and how a model is filled."""

from typing import Protocol

import torch
from torch import Tensor, nn

from megatron_zpp.model.init import local_ranges
from megatron_zpp.model.lora import is_adapter
from zeropp.checkpoint.state_tensors import names_elsewhere, shape_differences
from zeropp.errors import InputError, first_lines
from zeropp.optim.step import local_part


class WeightSource(Protocol):
    """Weights by the names of a GPT's parameters, read one tensor at a time.

    Between two calls a source holds no more memory than one tensor needs.
    """

    def facts(self) -> dict[str, Tensor]:
        """Every tensor's shape and dtype by name, as tensors on the meta device."""

    def read(self, name: str) -> Tensor:
        """One whole tensor on the CPU, in the dtype of the file."""


@torch.no_grad()
def fill_parameters(model: nn.Module, weights: WeightSource) -> None:
    """Copy weights into all parameters of a model but LoRA's adapters, cast to their dtypes.

    The parameters' memory must be allocated. They are plain tensors, or DTensors placed by Shard
    and Replicate, of which only the local part is written; each rank reads for itself. Raises
    InputError, before anything is written, if names or shapes of parameters and weights differ.
    """
    parameters = {
        name: parameter for name, parameter in model.named_parameters() if not is_adapter(name)
    }
    lines = shape_differences(parameters, weights.facts(), names_elsewhere(model))
    if lines:
        raise InputError(f"the weights are not those of the model:\n  {first_lines(lines)}")
    for name, parameter in parameters.items():
        local = tuple(slice(start, end) for start, end in local_ranges(parameter))
        local_part(parameter).copy_(weights.read(name)[local])
