"""The weights of a GPT in files, read one tensor at a time under the names of its parameters."""

from typing import Protocol

import torch
from torch import Tensor, nn

from megatron_zpp.model.init import local_ranges
from megatron_zpp.model.lora import is_adapter
from zeropp.checkpoint.state_tensors import few
from zeropp.errors import InputError
from zeropp.optim.step import local_part


class Weights(Protocol):
    """A source of weights; nothing is held between two calls but what one tensor needs."""

    def facts(self) -> dict[str, Tensor]:
        """Every tensor's shape and dtype by name, as tensors on the meta device."""

    def read(self, name: str) -> Tensor:
        """One whole tensor on the CPU, in the dtype of the file."""


@torch.no_grad()
def fill(model: nn.Module, weights: Weights) -> None:
    """Copy into every parameter of a model whose storage exists, cast to its dtype; LoRA's
    adapters are left alone.

    Parameters are plain tensors or DTensors placed by Shard and Replicate, of which only the local
    part is written; each rank reads for itself. Raises InputError, before anything is written, for
    parameters that the files lack or have in another shape, and for what they have beyond them.
    """
    parameters = {n: own for n, own in model.named_parameters() if not is_adapter(n)}
    facts = weights.facts()
    missing = [name for name in parameters if name not in facts]
    extra = [name for name in facts if name not in parameters]
    lines = [f"missing: {few(missing)}"] * bool(missing) + [f"extra: {few(extra)}"] * bool(extra)
    lines += [
        f"{name} has shape {list(facts[name].shape)}, expected {list(parameter.shape)}"
        for name, parameter in parameters.items()
        if name in facts and facts[name].shape != parameter.shape
    ]
    if lines:
        raise InputError("the weights are not those of the model:\n  " + "\n  ".join(lines))
    for name, parameter in parameters.items():
        mine = tuple(slice(first, end) for first, end in local_ranges(parameter))
        local_part(parameter).copy_(weights.read(name)[mine])
