"""Where a loss that is not finite, or far above the last ones, comes from.

All ranks call these functions, as they all see the same loss. They compute the global batch again,
with the weights as they are now; that changes neither weights nor the digits of later iterations.
"""

import math
import statistics
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

from megatron_zpp.train.batches import TRAIN, loader
from megatron_zpp.train.pending_iteration import PendingIteration
from megatron_zpp.train.run import Run
from megatron_zpp.train.step import forward_backward
from zeropp.optim.step import global_norm, local_part
from zeropp.ranks.coordination import gather_objects

MOST_SHOWN = 3


def source_of_non_finite(run: Run, pending: PendingIteration) -> str:
    """Name the weights that are not finite, and the first such tensor of each micro-batch."""
    weights = [
        name
        for name, parameter in run.sharding.model.named_parameters()
        if not bool(local_part(parameter.detach()).isfinite().all())
    ]
    with _first_non_finite(run.sharding.model) as tensors:
        _compute_again(run, pending.samples)
    batches = _micro_batches(run, pending)
    by_rank = gather_objects((weights, tensors, [math.isfinite(loss) for _, loss in batches]))
    lines = []
    for rank, (weights, tensors, finite) in enumerate(by_rank):
        lines += [f"the weight {name} on rank {rank}" for name in weights]
        for index, is_finite in enumerate(finite):
            samples = _samples(run, pending.samples, rank, index)
            if index in tensors:
                lines.append(f"{tensors[index]} on rank {rank} for samples {samples}")
            elif not is_finite:
                lines.append(
                    f"the loss on rank {rank} for samples {samples}, which is finite when it is "
                    "computed again: suspect the hardware of this rank"
                )
    return f"not finite: {_first_few(lines)}" if lines else "computed again, all is finite"


def describe_spike(run: Run, pending: PendingIteration) -> str:
    """Name the micro-batch with the largest loss, and the tensors with the largest gradients."""
    losses = [
        (loss, rank, samples)
        for rank, batches in enumerate(gather_objects(_micro_batches(run, pending)))
        for samples, loss in batches
    ]
    loss, rank, samples = max(losses)
    median = statistics.median(loss for loss, _, _ in losses)
    text = f"largest on rank {rank} for samples {samples}: {loss:.4g} (median {median:.4g})"
    if run.config.zero.offloads_optimizer:  # gradients are on their way to the host
        return text
    _compute_again(run, pending.samples)
    norms = {
        name: global_norm([(parameter, local_part(parameter.grad))], run.sharding).item()
        for name, parameter in run.sharding.model.named_parameters()
        if parameter.grad is not None
    }
    run.optimizer.zero_grad(set_to_none=True)
    largest = sorted(norms, key=norms.__getitem__, reverse=True)[:MOST_SHOWN]
    return f"{text}; largest gradients: " + ", ".join(f"{n} {norms[n]:.3g}" for n in largest)


def _micro_batches(run: Run, pending: PendingIteration) -> list[tuple[str, float]]:
    """This rank's micro-batches of an iteration: samples and loss."""
    return [
        (_samples(run, pending.samples, run.ranks.replica, index), loss.item())
        for index, loss in enumerate(pending.micro_batch_losses)
    ]


def _samples(run: Run, batch: range, rank: int, index: int) -> str:
    """The samples of a rank's micro-batch, as for --skip-samples."""
    size = run.config.batch.micro_batch_size
    first = batch.start + (index * run.ranks.num_replicas + rank) * size
    return f"{first}:{first + size}"


def _compute_again(run: Run, samples: range) -> None:
    """Run the forward and backward passes of a global batch."""
    with loader(run, TRAIN, samples.start) as batches:
        forward_backward(run, batches, len(samples), loss_scale=1.0)


@contextmanager
def _first_non_finite(model: nn.Module) -> Iterator[dict[int, str]]:
    """Yield a dict that passes fill: for each of them, by number, the first tensor not finite."""
    first: dict[int, str] = {}
    num_passes = 0

    def begin(module: nn.Module, inputs: Any) -> None:
        nonlocal num_passes
        num_passes += 1

    def check(text: str, number: int, tensor: Tensor) -> None:
        if number not in first and not bool(tensor.isfinite().all()):
            first[number] = text

    def check_output(name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        if not isinstance(output, Tensor) or not output.is_floating_point():
            return
        what, number = f"the output of {name or 'the model'}", num_passes - 1
        check(what, number, output.detach())
        if output.requires_grad:
            output.register_hook(partial(check, f"the gradient of {what}", number))

    with ExitStack() as hooks:
        hooks.callback(model.register_forward_pre_hook(begin).remove)
        for name, module in model.named_modules():
            handle = module.register_forward_hook(partial(check_output, name))
            hooks.callback(handle.remove)
        yield first


def _first_few(lines: Sequence[str]) -> str:
    more = len(lines) - MOST_SHOWN
    return "; ".join(lines[:MOST_SHOWN]) + (f"; and {more} more" if more > 0 else "")
