"""The training steps that are compared: ours, and what a person would write with PyTorch alone.

All start from the same weights, see the same micro-batches, clip, and update with fused AdamW.
"""

import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from benchmarks.shared.setting import CLIP, LEARNING_RATE, WEIGHT_DECAY, Setting
from megatron_zpp.data.loader import Batch
from megatron_zpp.model.gpt import GPT
from megatron_zpp.model.init import initialize
from megatron_zpp.monitor.console import Console
from megatron_zpp.train.build import build_run
from megatron_zpp.train.loop import TRAIN, loader
from megatron_zpp.train.step import train_step
from megatron_zpp.train.stop import Stopping
from zeropp import optimizer_step, shard
from zeropp.fsdp_adapter import gather_ahead
from zeropp.sharding.shard import find_nodes, use_gradient_mean
from zeropp.wire.route import gradient_route
from zeropp.wire.traffic import Traffic

Step = Callable[[], tuple[float, torch.Tensor | float]]  # loss of this rank; norm of the gradients
Feed = Iterator[list[Batch]]


@dataclass(frozen=True, kw_only=True)
class Contestant:
    """A model, its optimizer, and one step of training: this rank's loss, the gradients' norm."""

    name: str
    model: nn.Module
    optimizer: torch.optim.Optimizer
    step: Step
    global_loss: bool = False  # the loss is already that of all ranks


def ours(setting: Setting, name: str = "ours") -> Contestant:
    """A step of `pretrain_gpt.py`: loader, schedules, step and the numbers of the log."""
    config = setting.config
    console = Console(setting.ranks.rank, io.StringIO(), interactive=False)
    run = build_run(config, setting.ranks, console, Stopping(config.training))
    batches = loader(run, TRAIN, 0)

    def step() -> tuple[float, float]:
        done = train_step(run, batches).result()
        return done.loss, done.grad_norm

    model, optimizer = run.sharding.model, run.optimizer
    return Contestant(name=name, model=model, optimizer=optimizer, step=step, global_loss=True)


def bare(setting: Setting, name: str, feed: Feed, *, torch_loss: bool = False) -> Contestant:
    """The same layers on one rank in a plain loop, with our loss or PyTorch's cross-entropy."""
    model = unsharded(setting)
    _fill(model, setting)
    optimizer = adamw(model.parameters())
    loss_of = _torch_loss if torch_loss else _model_loss

    def step() -> tuple[float, torch.Tensor]:
        return _plain_step(model, optimizer, next(feed), loss_of)

    return Contestant(name=name, model=model, optimizer=optimizer, step=step)


def fsdp2(
    setting: Setting, name: str, feed: Feed, *, all_to_all: bool = False, ahead: bool = False
) -> Contestant:
    """Plain FSDP2 that sends what we send; `all_to_all` and `ahead` add one part of ours each."""
    zero, mesh, model = setting.config.zero, setting.ranks.mesh, unsharded(setting)
    wire_dtype = getattr(torch, zero.wire_format)
    policy = MixedPrecisionPolicy(
        param_dtype=getattr(torch, zero.compute_format),
        reduce_dtype=torch.float32 if all_to_all else wire_dtype,
    )
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    if all_to_all:
        route = gradient_route(zero, find_nodes(mesh, zero))
        use_gradient_mean((*model.blocks, model), mesh, route, Traffic(), wire_dtype)
    if ahead:
        gather_ahead(model, model.blocks)
    _fill(model, setting)
    optimizer = adamw(model.parameters())

    def step() -> tuple[float, torch.Tensor]:
        return _plain_step(model, optimizer, next(feed), _model_loss)

    return Contestant(name=name, model=model, optimizer=optimizer, step=step)


def zeropp_loop(setting: Setting, name: str, feed: Feed) -> Contestant:
    """`zeropp.shard` and `zeropp.optimizer_step` in a plain loop, without Megatron-Z++ around."""
    model = unsharded(setting)
    sharding = shard(model, setting.ranks.mesh, setting.config.zero)
    _fill(model, setting)
    optimizer = adamw(model.parameters())

    def step() -> tuple[float, float]:
        total, batches = 0.0, next(feed)
        for index, batch in enumerate(batches):
            with sharding.micro_step(last=index == len(batches) - 1):
                loss = _model_loss(model, batch) / len(batches)
                loss.backward()
            total += loss.detach()
        result = optimizer_step(optimizer, sharding, clip_grad=CLIP)
        return total.item(), result.grad_norm

    return Contestant(name=name, model=model, optimizer=optimizer, step=step)


def whole(norm: torch.Tensor | float) -> float:
    """The norm over all ranks, of whatever kind a step returned."""
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)


def steps_of(batches: Sequence[Batch], micro_batches: int) -> Feed:
    """The micro-batches of one step after the other."""
    for first in range(0, len(batches), micro_batches):
        yield list(batches[first : first + micro_batches])


def unsharded(setting: Setting) -> GPT:
    """The model on the meta device, without memory."""
    with torch.device("meta"):
        return GPT(setting.config.model, setting.vocab_size)


def adamw(parameters: Iterable[torch.Tensor]) -> torch.optim.AdamW:
    """Fused AdamW in Megatron's two groups: matrices decay, biases and gains do not."""
    parameters = list(parameters)
    matrices = [p for p in parameters if p.ndim >= 2]
    vectors = [p for p in parameters if p.ndim < 2]
    return torch.optim.AdamW(
        [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}],
        lr=LEARNING_RATE,
        weight_decay=WEIGHT_DECAY,
        fused=True,
    )


def _plain_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: list[Batch],
    loss_of: Callable[[nn.Module, Batch], torch.Tensor],
) -> tuple[float, torch.Tensor]:
    total = 0.0
    for batch in batches:
        loss = loss_of(model, batch) / len(batches)
        loss.backward()
        total += loss.detach()
    norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    optimizer.step()
    optimizer.zero_grad()
    return total.item(), norm


def _model_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    return model(batch.tokens, batch.labels, batch.loss_mask, batch.position_ids)


def _torch_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    logits = model(batch.tokens, position_ids=batch.position_ids)
    return F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten())


def _fill(model: GPT, setting: Setting) -> None:
    model.to_empty(device=setting.ranks.device)
    initialize(model, setting.config.training.seed, setting.config.model)
