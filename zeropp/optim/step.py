"""One optimizer step on sharded gradients: unscale, measure, clip, update, all or nothing."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from zeropp.errors import InputError
from zeropp.optim.loss_scale import LossScaler
from zeropp.sharding import Sharding

CLIP_EPSILON = 1e-6  # Megatron's: clip / (norm + 1e-6)


class StepResult(NamedTuple):
    """What a step did: the gradients' norm before clipping, and whether it was skipped."""

    grad_norm: float
    skipped: bool
    num_zeros: float | None = None


def optimizer_step(
    optimizer: torch.optim.Optimizer,
    sharding: Sharding,
    *,
    clip_grad: float = 0.0,
    scaler: LossScaler | None = None,
    count_zeros: bool = False,
) -> StepResult:
    """Update the parameters from their gradients, which are cleared; the same on every rank.

    Gradients are divided by the scaler's scale and, where their global L2 norm exceeds
    `clip_grad` > 0, scaled down to it. A non-finite norm skips the update (every rank agrees,
    the norm being global) and, with a scaler, lowers its scale. Raises InputError where no
    parameter of the optimizer has a gradient.
    """
    _require_gradients(optimizer)
    gradients = local_gradients(optimizer)
    scale = scaler.scale if scaler else 1.0
    norm = global_norm(gradients, sharding) / scale
    finite = norm < float("inf")  # False for NaN too
    num_zeros = global_zeros(gradients, sharding) if count_zeros else None
    if finite:
        factor = 1.0 / scale
        if clip_grad > 0.0 and norm > clip_grad - CLIP_EPSILON:
            factor *= clip_grad / (norm + CLIP_EPSILON)
        if factor != 1.0 and gradients:
            torch._foreach_mul_(gradients, factor)
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if scaler:
        scaler.update(overflow=not finite)
    return StepResult(norm, not finite, num_zeros)


def local_gradients(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """This rank's slices of the gradients, as plain tensors that share their memory; none empty."""
    owners = (p for group in optimizer.param_groups for p in group["params"])
    slices = [local_part(p.grad) for p in owners if p.grad is not None]
    return [one for one in slices if one.numel()]


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's slice of a possibly distributed tensor, sharing its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def global_norm(tensors: Sequence[torch.Tensor], sharding: Sharding) -> float:
    """L2 norm over all ranks' slices, summed in fp64."""
    filled = [t for t in tensors if t.numel()]
    norms = torch._foreach_norm(filled, dtype=torch.float32) if filled else ()
    squares = [torch.stack(norms).double().square().sum()] if norms else []
    return _sum_over_ranks(squares, sharding) ** 0.5


def global_zeros(tensors: Sequence[torch.Tensor], sharding: Sharding) -> float:
    """How many elements over all ranks' slices are zero."""
    return _sum_over_ranks([t.numel() - torch.count_nonzero(t) for t in tensors], sharding)


def _require_gradients(optimizer: torch.optim.Optimizer) -> None:
    if all(p.grad is None for group in optimizer.param_groups for p in group["params"]):
        raise InputError(
            "no parameter of the optimizer has a gradient: make the optimizer after zeropp.shard, "
            "which puts shards in the places of the parameters, and call backward() before a step"
        )


def _sum_over_ranks(terms: list[torch.Tensor], sharding: Sharding) -> float:
    """Sum of this rank's terms and the others', in fp64; a rank may have none."""
    device = next(sharding.model.parameters()).device
    total = torch.zeros((), dtype=torch.float64, device=device)
    if terms:
        total += torch.stack(terms).sum(dtype=torch.float64)
    if sharding.shards_gradients:
        dist.all_reduce(total, group=sharding.group)
    return total.item()
