"""A sharded model as one file of whole 16-bit weights, which the plain model loads.

Weights are gathered one at a time, in 16 bit already, and only the first rank keeps them, in its
host memory: no device ever holds the whole model.
"""

from pathlib import Path

import safetensors.torch
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from zeropp.atomic import write_atomically
from zeropp.checkpoint.state_tensors import NONE, Masters
from zeropp.ranks.coordination import fail_together, rank


def save_weights(model: nn.Module, path: Path, dtype: torch.dtype, masters: Masters = NONE) -> None:
    """Write the state dict to `path` from rank 0, floats as `dtype`; all ranks call it.

    Of parameters with fp32 `masters` elsewhere these are written: they may be newer. A
    `.safetensors` file holds tied weights once, under their first name; any other is torch.save's
    and keeps them tied. Raises OSError on all ranks where the file cannot be written.
    """
    weights = whole_weights(model, dtype, masters)
    with fail_together():
        if rank() == 0:
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.suffix == ".safetensors":
                text = {"format": "pt"}
                content = safetensors.torch.save(_once(weights), metadata=text)
                write_atomically(path, lambda file: file.write(content))
            else:
                write_atomically(path, lambda file: torch.save(weights, file))


def whole_weights(
    model: nn.Module, dtype: torch.dtype, masters: Masters
) -> dict[str, torch.Tensor]:
    """The whole state dict on the CPU of rank 0, tied names sharing memory; empty elsewhere."""
    gathered: dict[int, torch.Tensor | None] = {}
    weights = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if id(value) not in gathered:
            gathered[id(value)] = _whole(masters.get(value, value), dtype, value.device)
        if (whole := gathered[id(value)]) is not None:
            weights[name] = whole
    return weights


def _whole(value: torch.Tensor, dtype: torch.dtype, device: torch.device) -> torch.Tensor | None:
    """The value from all ranks, which exchange it as tensors of `device`."""
    value = value.detach()
    if value.is_floating_point():
        value = value.to(device, dtype)
    if isinstance(value, DTensor):
        value = value.full_tensor()
    return value.to("cpu", copy=True) if rank() == 0 else None


def _once(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Each tensor under its first name: safetensors refuses shared memory."""
    names = {id(value): name for name, value in reversed(weights.items())}
    return {name: weights[name].contiguous() for name in sorted(names.values())}
