"""Finds the cause of a loss that is not finite, or far above the last ones.

All ranks call these functions, as they all see the same loss. They compute the global batch again,
with the weights as they are now; that changes neither weights nor the digits of later iterations.
"""

import math
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

from megatron_zpp.model.gpt import GPT
from megatron_zpp.train.inputs import TRAIN, Batches
from megatron_zpp.train.pending_iteration import PendingIteration
from megatron_zpp.train.trainer import Trainer
from zeropp import Sharding
from zeropp import fsdp_adapter as fsdp
from zeropp.optim import local_part, sharded
from zeropp.ranks import gather_objects

MOST_SHOWN = 3
CAUSES = ("the weight", "the output", "the loss", "the gradient")  # before what follows from them


def source_of_non_finite(trainer: Trainer, batches: Batches, pending: PendingIteration) -> str:
    """Name the weights that are not finite, and the first such tensor of each micro-batch."""
    weights = [
        name
        for name, parameter in trainer.sharding.model.named_parameters()
        if not bool(local_part(parameter.detach()).isfinite().all())
    ]
    with _first_non_finite(trainer.passes.roots) as tensors:
        _compute_again(trainer, batches, pending.samples)
    samples = _samples_of_micro_batches(trainer, pending)
    finite = [math.isfinite(loss) for loss in pending.micro_batch_losses]
    lines = []
    by_rank = gather_objects((weights, tensors, samples, finite))
    for rank, (weights, tensors, samples, finite) in enumerate(by_rank):
        lines += [f"the weight {name} on rank {rank}" for name in weights]
        for index, text in enumerate(samples):
            if index in tensors:
                lines.append(f"{tensors[index]} on rank {rank} for samples {text}")
            elif index < len(finite) and not finite[index]:
                lines.append(
                    f"the loss on rank {rank} for samples {text}, which is finite when it is "
                    "computed again: suspect the hardware of this rank"
                )
    lines.sort(key=lambda line: CAUSES.index(" ".join(line.split()[:2])))
    return f"not finite: {_first_few(lines)}" if lines else "computed again, all is finite"


def describe_spike(trainer: Trainer, batches: Batches, pending: PendingIteration) -> str:
    """Name the micro-batch with the largest loss, and the tensors with the largest gradients."""
    own = [
        (loss.item(), samples)
        for loss, samples in zip(
            pending.micro_batch_losses, _samples_of_micro_batches(trainer, pending), strict=False
        )
    ]
    losses = [
        (loss, rank, samples)
        for rank, batches in enumerate(gather_objects(own))
        for loss, samples in batches
    ]
    loss, rank, samples = max(losses)
    median = statistics.median(loss for loss, _, _ in losses)
    text = f"largest on rank {rank} for samples {samples}: {loss:.4g} (median {median:.4g})"
    if sharded(trainer.optimizer).masters:  # gradients are on their way to them
        return text
    _compute_again(trainer, batches, pending.samples)
    norms = _gradient_norms(trainer.sharding)
    trainer.optimizer.zero_grad(set_to_none=True)
    largest = sorted(norms, key=norms.__getitem__, reverse=True)[:MOST_SHOWN]
    return f"{text}; largest gradients: " + ", ".join(f"{n} {norms[n]:.3g}" for n in largest)


def _gradient_norms(sharding: Sharding) -> dict[str, float]:
    """L2 norm of each parameter's gradient, of the parameters of all ranks."""
    squares = {
        name: local_part(parameter.grad).double().square().sum().item()
        / sharding.num_holders(parameter)
        for name, parameter in sharding.model.named_parameters()
        if parameter.grad is not None
    }
    total: Counter[str] = Counter()
    for of_rank in gather_objects(squares):
        total.update(of_rank)
    return {name: math.sqrt(square) for name, square in total.items()}


def _samples_of_micro_batches(trainer: Trainer, pending: PendingIteration) -> list[str]:
    """The samples of this rank's micro-batches of an iteration, as for --skip-samples."""
    size, batch = trainer.config.batch.micro_batch_size, pending.samples
    step = size * trainer.ranks.num_parts
    firsts = range(batch.start + trainer.ranks.part * size, batch.stop, step)
    return [f"{first}:{first + size}" for first in firsts]


def _compute_again(trainer: Trainer, batches: Batches, samples: range) -> None:
    """Run the forward and backward passes of a global batch."""
    with batches.loader(TRAIN, samples.start) as loader:
        trainer.forward_backward(loader, len(samples), loss_scale=1.0)


@contextmanager
def _first_non_finite(roots: Sequence[GPT]) -> Iterator[dict[int, str]]:
    """Yield a dict that passes fill: for each of them, by number, the first tensor not finite."""
    first: dict[int, str] = {}
    with ExitStack() as hooks:
        for root in roots:
            _watch(root, first, hooks)
        yield first


def _watch(root: nn.Module, first: dict[int, str], hooks: ExitStack) -> None:
    """Enter into `first`, until `hooks` are removed, what the modules in `root` return."""
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
        if fsdp.backward_id() != -1:  # recomputed, maybe after the next pass has begun
            return
        what, number = f"the output of {name or 'the model'}", num_passes - 1
        check(what, number, output.detach())
        if output.requires_grad:
            output.register_hook(partial(check, f"the gradient of {what}", number))

    hooks.callback(root.register_forward_pre_hook(begin).remove)
    for name, module in root.named_modules():
        handle = module.register_forward_hook(partial(check_output, name))
        hooks.callback(handle.remove)


def _first_few(lines: Sequence[str]) -> str:
    more = len(lines) - MOST_SHOWN
    return "; ".join(lines[:MOST_SHOWN]) + (f"; and {more} more" if more > 0 else "")
