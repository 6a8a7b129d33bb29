"""Writes a sharded model's weights to one 16-bit file, which the plain model loads.

Weights are converted to 16 bit and gathered one at a time, and only rank 0 keeps them, in host
memory: no device ever holds the whole model.
"""

from pathlib import Path

import safetensors.torch
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from zeropp.atomic import write_atomically
from zeropp.fsdp_adapter import gather_whole
from zeropp.optim.sharded_optimizer import Masters
from zeropp.ranks.coordination import fail_together, rank


def save_gathered_weights(
    model: nn.Module,
    path: Path,
    dtype: torch.dtype,
    masters: Masters,
    *,
    exclude_frozen: bool = False,
) -> None:
    """Write the state dict to `path` from rank 0, floats as `dtype`; all ranks call it.

    `exclude_frozen` leaves out parameters that do not require gradients. A parameter that has an
    fp32 master in `masters` is written from that, which may be newer. A `.safetensors` file holds
    tied weights once, under their first name; any other file is written by torch.save and keeps
    them tied. Raises OSError on all ranks if the file cannot be written.
    """
    weights = gather_weights(model, dtype, masters, exclude_frozen=exclude_frozen)
    with fail_together():
        if rank() == 0:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_weights(path, weights)


def write_weights(path: Path, weights: dict[str, torch.Tensor]) -> None:
    """Write weights by name: as safetensors, tied ones once, or, with ties, by torch.save."""
    if path.suffix == ".safetensors":
        content = safetensors.torch.save(_without_tied_names(weights), metadata={"format": "pt"})
        write_atomically(path, lambda file: file.write(content))
    else:
        write_atomically(path, lambda file: torch.save(weights, file))


def gather_weights(
    model: nn.Module, dtype: torch.dtype, masters: Masters, *, exclude_frozen: bool = False
) -> dict[str, torch.Tensor]:
    """Return the whole state dict on the CPU of rank 0, floats as `dtype`; empty elsewhere.

    Tied names share memory. `exclude_frozen` leaves out parameters that do not require gradients.
    """
    gathered: dict[int, torch.Tensor | None] = {}
    weights = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if exclude_frozen and isinstance(value, nn.Parameter) and not value.requires_grad:
            continue
        if id(value) not in gathered:
            gathered[id(value)] = _gather(masters.get(value, value), dtype, value.device)
        weight = gathered[id(value)]
        if weight is not None:
            weights[name] = weight
    return weights


def _gather(value: torch.Tensor, dtype: torch.dtype, device: torch.device) -> torch.Tensor | None:
    """The whole tensor on the CPU of rank 0, None elsewhere; ranks exchange it on `device`."""
    value = value.detach()
    if value.is_floating_point():
        value = value.to(device, dtype)
    if isinstance(value, DTensor):
        value = gather_whole(value)
    return value.to("cpu", copy=True) if rank() == 0 else None


def _without_tied_names(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Each tensor under its first name only, as safetensors refuses shared memory."""
    first_names = {id(value): name for name, value in reversed(weights.items())}
    return {name: weights[name].contiguous() for name in sorted(first_names.values())}
