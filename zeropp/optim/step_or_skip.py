"""One optimizer step on sharded gradients: unscale, clip, update, or skip on all ranks."""

import math
from collections.abc import Iterable, Sequence

import torch

from zeropp.errors import InputError
from zeropp.fsdp_adapter import local_part
from zeropp.optim.host_values import HostValues
from zeropp.optim.loss_scale import LossScaler
from zeropp.optim.remap import require_on_shards
from zeropp.optim.sharded_optimizer import sharded, takes_factor
from zeropp.sharding.sharding import Sharding

CLIP_EPSILON = 1e-6  # Megatron's: clip / (norm + 1e-6)


class StepResult:
    """The result of a step. Reading a property waits until the device has computed it."""

    def __init__(self, values: HostValues) -> None:
        self._values = values

    @property
    def grad_norm(self) -> float:
        """L2 norm of the gradients of all ranks before clipping, without the loss scale."""
        return self._values.values[0]

    @property
    def factor(self) -> float:
        """What gradients were multiplied by, for loss scale and clipping; NaN if skipped."""
        return self._values.values[1]

    @property
    def skipped(self) -> bool:
        """Whether the update was skipped because the norm or the loss was not finite."""
        return math.isnan(self.factor)

    @property
    def num_zeros(self) -> float | None:
        """Number of zero elements in the gradients, if `count_zeros` was set."""
        return self._values.values[2] if len(self._values.values) > 2 else None


def optimizer_step(
    optimizer: torch.optim.Optimizer,
    sharding: Sharding,
    *,
    clip_grad: float = 0.0,
    scaler: LossScaler | None = None,
    count_zeros: bool = False,
    loss: torch.Tensor | None = None,
) -> StepResult:
    """Update the parameters from their gradients, which are cleared; the same on every rank.

    What is not finite skips the update. With `zeropp.FusedAdam` the host does not wait.

    Args:
        optimizer: An optimizer of the sharded parameters.
        sharding: What `zeropp.shard` returned for them.
        clip_grad: Largest global L2 norm of the gradients; larger ones are scaled to it. 0: none.
        scaler: The loss scale of fp16, by which gradients are divided; lowered at an overflow.
        count_zeros: Whether to count the zero elements of the gradients.
        loss: The step's loss (0-d, the same on all ranks), which has to be finite too.

    Returns:
        The norm of the gradients, whether the step was skipped, and the zeros if counted.

    Raises:
        InputError: Without any gradient, for optimizers that cannot update shards, and after a
            backward pass that failed or whose order differed between ranks.

    Example:
        ```python
        with sharding.micro_step(last=True):
            model(inputs).sum().backward()
        print(zeropp.optimizer_step(optimizer, sharding, clip_grad=1.0).grad_norm)
        ```
    """
    sharding.require_complete_gradients()
    sharded(optimizer).await_gradients()
    require_on_shards(optimizer)
    _require_gradients(optimizer)
    gradients = own_gradients(optimizer)
    scale = scaler.scale if scaler else 1.0
    norm = global_norm(gradients, sharding) / scale
    factor = _factor(norm, scale, clip_grad, loss)
    zeros = (global_zeros(gradients, sharding),) if count_zeros else ()
    result = StepResult(HostValues(norm, factor, *zeros))
    is_ours = takes_factor(optimizer)
    host_waits = scaler is not None or not is_ours
    is_skipped = host_waits and result.skipped
    if host_waits:
        sharding.require_same_order()
    if is_ours and not is_skipped:
        optimizer.step(factor=factor.float())
    elif not is_skipped:
        scale_gradients((part for _, part in gradients), result.factor)
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if scaler:
        scaler.update(overflow=result.skipped)
    return result


Parts = Sequence[tuple[torch.Tensor, torch.Tensor]]  # parameters, and this rank's slices of tensors


def own_gradients(optimizer: torch.optim.Optimizer) -> Parts:
    """This rank's slices of the gradients, as plain tensors that share their memory; none empty."""
    owners = (parameter for group in optimizer.param_groups for parameter in group["params"])
    parts = [(owner, local_part(owner.grad)) for owner in owners if owner.grad is not None]
    return [(owner, part) for owner, part in parts if part.numel()]


def gradient_parts(
    optimizer: torch.optim.Optimizer, parameters: Iterable[torch.nn.Parameter]
) -> list[torch.Tensor]:
    """Return this rank's slices of the gradients of a model's parameters, or of their masters.

    Plain tensors that share their memory; parameters without a gradient are left out.
    """
    holder = sharded(optimizer)
    holder.await_gradients()
    masters = holder.masters
    gradients = (masters.get(parameter, parameter).grad for parameter in parameters)
    return [local_part(gradient) for gradient in gradients if gradient is not None]


def scale_gradients(gradients: Iterable[torch.Tensor], factor: float) -> None:
    """Multiply gradients, sharded on any meshes or not at all, by a factor in place."""
    parts = [local_part(gradient) for gradient in gradients]
    if factor != 1.0 and parts:
        torch._foreach_mul_(parts, factor)


def global_norm(parts: Parts, sharding: Sharding) -> torch.Tensor:
    """L2 norm over all ranks' slices, summed in fp64; 0-d. What several ranks hold counts once."""
    alike: dict[tuple[torch.device, int], list[torch.Tensor]] = {}
    for owner, part in parts:
        if part.numel():
            copies = sharding.num_copies(owner)
            alike.setdefault((part.device, copies), []).append(part)
    squares = []
    for (_, copies), tensors in alike.items():
        norms = torch.stack(torch._foreach_norm(tensors, dtype=torch.float32))
        squares.append(norms.double().square().sum() / copies)
    return _sum_over_ranks(squares, sharding).sqrt()


def global_zeros(parts: Parts, sharding: Sharding) -> torch.Tensor:
    """How many elements over all ranks' slices are zero; fp64, 0-d."""
    counts = [
        (part.numel() - torch.count_nonzero(part)).double() / sharding.num_copies(owner)
        for owner, part in parts
    ]
    return _sum_over_ranks(counts, sharding)


def _factor(
    norm: torch.Tensor, scale: float, clip_grad: float, loss: torch.Tensor | None
) -> torch.Tensor:
    """What gradients are multiplied by, fp64 and 0-d; NaN where they must not be used."""
    factor = torch.full_like(norm, 1.0 / scale)
    if clip_grad > 0.0:
        clipped = factor * (clip_grad / (norm + CLIP_EPSILON))
        factor = torch.where(norm > clip_grad - CLIP_EPSILON, clipped, factor)
    finite = norm.isfinite() if loss is None else norm.isfinite() & loss.isfinite()
    return torch.where(finite, factor, float("nan"))


def _require_gradients(optimizer: torch.optim.Optimizer) -> None:
    if all(p.grad is None for group in optimizer.param_groups for p in group["params"]):
        raise InputError(
            "no parameter of the optimizer has a gradient: make the optimizer after zeropp.shard, "
            "which puts shards in the places of the parameters, and before the forward pass, which "
            "gathers them; and call backward() before a step"
        )


def _sum_over_ranks(terms: list[torch.Tensor], sharding: Sharding) -> torch.Tensor:
    """Sum of this rank's terms and the others', in fp64; a rank may have none."""
    device = next(sharding.model.parameters()).device
    total = torch.zeros((), dtype=torch.float64, device=device)
    if terms:
        total += torch.stack([term.to(device) for term in terms]).sum(dtype=torch.float64)
    return sharding.grid.sum(total, over_data=sharding.parts_gradients)
