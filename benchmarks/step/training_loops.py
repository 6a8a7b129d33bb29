"""Training loops that are compared: ours, and what a person would write with PyTorch alone.

All start from the same weights, see the same micro-batches, clip, and update with fused AdamW. A
step may return before its numbers are known, so that no loop waits where a person would not.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from benchmarks.shared.pretrain_run import silent_run, training_batches
from benchmarks.shared.training_setup import CLIP, LEARNING_RATE, WEIGHT_DECAY, TrainingSetup
from megatron_zpp.data.loader import Batch
from megatron_zpp.model.gpt import GPT
from megatron_zpp.model.init import initialize
from megatron_zpp.train.pending_iteration import PendingIteration
from zeropp import attach, shard
from zeropp.optim.step_or_skip import local_part

LossOf = Callable[[Batch], Tensor]
Steps = Iterator[Sequence[Batch]]  # the micro-batches of one step after another
# Waits for a step, then gives its mean loss and the norm of its gradients.
StepNumbers = Callable[[], tuple[float, Tensor | float]]


def _nothing() -> None:
    pass


def _no_context(*, last: bool) -> AbstractContextManager:
    return nullcontext()


@dataclass(frozen=True, kw_only=True)
class TrainingLoop:
    """A model in training; each call of `step` begins a step."""

    name: str
    model: nn.Module
    optimizer: torch.optim.Optimizer
    step: Callable[[], StepNumbers]
    global_loss: bool = False  # the loss is the mean over all ranks, not this rank's
    close: Callable[[], None] = _nothing


def ours(setup: TrainingSetup, name: str = "ours") -> TrainingLoop:
    """The loop of pretrain_gpt.py: data loader, schedules, step, and the last step's log."""
    run = silent_run(setup.config, setup.ranks)
    batches = training_batches(run)
    unfinished: list[PendingIteration] = []

    def step() -> StepNumbers:
        previous = unfinished.pop() if unfinished else None
        current = run.trainer.step(batches, previous)
        if previous:
            previous.result()
        unfinished.append(current)
        return partial(numbers_of, current)

    def numbers_of(iteration: PendingIteration) -> tuple[float, float]:
        unfinished[:] = [other for other in unfinished if other is not iteration]
        measured = iteration.result()
        return measured.loss, measured.grad_norm

    return TrainingLoop(
        name=name,
        model=run.trainer.sharding.model,
        optimizer=run.trainer.optimizer,
        step=step,
        global_loss=True,
        close=batches.close,
    )


def plain_pytorch(setup: TrainingSetup, name: str, steps: Steps) -> TrainingLoop:
    """The same layers on one rank in a plain loop."""
    model = unsharded(setup)
    _initialize(model, setup)
    return _clipping_loop(name, model, steps)


def fsdp2(setup: TrainingSetup, name: str, steps: Steps, *, attached: bool = False) -> TrainingLoop:
    """Plain FSDP2 with our dtypes on the wire; `attached`: with our collectives (`attach`)."""
    model, zero = unsharded(setup), setup.config.zero
    policy = MixedPrecisionPolicy(
        param_dtype=getattr(torch, zero.compute_format),
        reduce_dtype=getattr(torch, zero.wire_format),
    )
    for unit in (*model.blocks, model):
        fully_shard(unit, mesh=setup.ranks.mesh, mp_policy=policy)
    if attached:
        attach(model, zero)
    _initialize(model, setup)
    return _clipping_loop(name, model, steps)


def sharded(setup: TrainingSetup, name: str, steps: Steps) -> TrainingLoop:
    """`zeropp.shard` in the loop of plain FSDP2."""
    model = unsharded(setup)
    shard(model, setup.ranks.mesh, setup.config.zero)
    _initialize(model, setup)
    return _clipping_loop(name, model, steps)


def accumulate(
    batches: Sequence[Batch],
    loss_of: LossOf,
    context: Callable[..., AbstractContextManager] = _no_context,
) -> Tensor:
    """Add up the gradients of one step's micro-batches; returns their mean loss.

    Each micro-batch runs within `context(last=...)`, which is told whether it is the last one.
    """
    total = torch.zeros((), device=batches[0].tokens.device)
    for index, batch in enumerate(batches):
        with context(last=index == len(batches) - 1):
            loss = loss_of(batch)
            (loss / len(batches)).backward()
        total += loss.detach() / len(batches)
    return total


def model_loss_of(model: nn.Module) -> LossOf:
    """The model's own loss."""
    return lambda batch: model(batch.tokens, batch.labels, batch.loss_mask, batch.position_ids)


def unsharded(setup: TrainingSetup) -> GPT:
    """The model on the meta device, without memory."""
    with torch.device("meta"):
        return GPT(setup.config.model, setup.vocab_size)


def adamw(parameters: Iterable[Tensor]) -> torch.optim.AdamW:
    """Fused AdamW in Megatron's two groups: matrices decay, biases and gains do not."""
    parameters = list(parameters)
    matrices = [parameter for parameter in parameters if parameter.ndim >= 2]
    vectors = [parameter for parameter in parameters if parameter.ndim < 2]
    return torch.optim.AdamW(
        [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}],
        lr=LEARNING_RATE,
        weight_decay=WEIGHT_DECAY,
        fused=True,
    )


def local_weights(model: nn.Module) -> dict[str, Tensor]:
    """This rank's shards by name, in the order of their names."""
    named = sorted(model.named_parameters())
    return {name: local_part(parameter.detach()) for name, parameter in named}


def _clipping_loop(name: str, model: nn.Module, steps: Steps) -> TrainingLoop:
    """Accumulate, clip, update."""
    optimizer, loss_of = adamw(model.parameters()), model_loss_of(model)

    def step() -> StepNumbers:
        loss = accumulate(next(steps), loss_of)
        norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return lambda: (loss.item(), norm)

    return TrainingLoop(name=name, model=model, optimizer=optimizer, step=step)


def _initialize(model: GPT, setup: TrainingSetup) -> None:
    model.to_empty(device=setup.ranks.device)
    initialize(model, setup.config.training.seed, setup.config.model)
