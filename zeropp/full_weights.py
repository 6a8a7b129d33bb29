"""A sharded model as one file of whole 16-bit weights, which the plain model loads.

Weights are gathered one at a time, in 16 bit already, and only the first rank keeps them, in its
host memory: no device ever holds the whole model.
"""

import logging
from pathlib import Path

import safetensors.torch
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from zeropp.atomic import write_atomically
from zeropp.unison import in_unison, rank

log = logging.getLogger("zeropp")


def save_weights(model: nn.Module, path: Path, dtype: torch.dtype) -> None:
    """Write the state dict to `path` from rank 0, floats as `dtype`; all ranks call it.

    A `.safetensors` file holds tied weights once, under their first name; any other is torch.save's
    and keeps them tied. Raises OSError on all ranks where the file cannot be written.
    """
    weights = whole_weights(model, dtype)
    with in_unison():
        if rank() == 0:
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.suffix == ".safetensors":
                text = {"format": "pt"}
                content = safetensors.torch.save(_once(weights), metadata=text)
                write_atomically(path, lambda file: file.write(content))
            else:
                write_atomically(path, lambda file: torch.save(weights, file))


def whole_weights(model: nn.Module, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The whole state dict on the CPU of rank 0, tied names sharing memory; empty elsewhere."""
    gathered: dict[int, torch.Tensor | None] = {}
    weights = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if id(value) not in gathered:
            gathered[id(value)] = _whole(value, dtype)
        if (whole := gathered[id(value)]) is not None:
            weights[name] = whole
    return weights


def _whole(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
    value = value.detach()
    if value.is_floating_point():
        value = value.to(dtype)
    if isinstance(value, DTensor):
        value = value.full_tensor()
    return value.to("cpu", copy=True) if rank() == 0 else None


def _once(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Each tensor under its first name: safetensors refuses shared memory."""
    names = {id(value): name for name, value in reversed(weights.items())}
    return {name: weights[name].contiguous() for name in sorted(names.values())}
