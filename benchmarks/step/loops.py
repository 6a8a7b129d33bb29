"""Training loops for one device: ours, and what a person would write with PyTorch alone.

All start from the same weights, see the same micro-batches, clip, and update with fused AdamW. The
bare loops hold the model in bf16 beside fp32 master weights, or in fp32 under autocast. A step
returns before its numbers are known, so that no loop waits where a person would not.
"""

import io
import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from types import MappingProxyType

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.shared.setting import CLIP, Setting
from benchmarks.step.contestants import adamw, steps_of, unsharded
from benchmarks.step.hugging_face_peer import hugging_face
from megatron_zpp.data.loader import Batch
from megatron_zpp.model.recompute import compile_blocks
from megatron_zpp.monitor.console import Console
from megatron_zpp.train.build import build_run
from megatron_zpp.train.loop import TRAIN, loader
from megatron_zpp.train.pending_iteration import PendingIteration
from megatron_zpp.train.step import train_step
from megatron_zpp.train.stop import Stopping
from zeropp.optim.step import local_part

LOSS_AND_NORM = attrgetter("loss", "grad_norm")
Numbers = Callable[[], tuple[float, float]]  # waits; the mean loss, the gradients' norm
Logits = Callable[[Tensor, Tensor], Tensor]  # of tokens and positions [B, S]: [B, S, V]


@dataclass(frozen=True, kw_only=True)
class Loop:
    """A training loop: one step begins with each call."""

    name: str
    step: Callable[[], Numbers]
    optimizer: torch.optim.Optimizer
    weights: Mapping[str, Tensor]  # by name, where they are updated
    close: Callable[[], None]


@dataclass(frozen=True, kw_only=True)
class Bare:
    """How a bare loop is written."""

    name: str
    autocast: bool = False  # fp32 weights under autocast; else bf16 ones and fp32 masters
    hugging_face: bool = False  # its model, not ours
    compiles: str | None = None  # "blocks", "whole"


BARE = MappingProxyType(
    {
        "blocks": Bare(name="bare loop, compiled blocks", compiles="blocks"),
        "whole": Bare(name="bare loop, compiled whole", compiles="whole"),
        "autocast-blocks": Bare(
            name="bare autocast loop, compiled blocks", autocast=True, compiles="blocks"
        ),
        "autocast-whole": Bare(
            name="bare autocast loop, compiled whole", autocast=True, compiles="whole"
        ),
        "eager": Bare(name="bare loop, not compiled"),
        "hf": Bare(name="Hugging Face, not compiled", hugging_face=True),
        "hf-whole": Bare(name="Hugging Face, compiled whole", hugging_face=True, compiles="whole"),
    }
)


def ours(setting: Setting) -> Loop:
    """The loop of pretrain_gpt.py: loader, schedules, step, and the numbers of the one before."""
    console = Console(setting.ranks.rank, io.StringIO(), interactive=False)
    config = setting.config
    run = build_run(config, setting.ranks, console, Stopping(config.training))
    batches = loader(run, TRAIN, 0)
    waiting: list[PendingIteration] = []

    def step() -> Numbers:
        behind = waiting.pop() if waiting else None
        begun = train_step(run, batches, behind)
        if behind:
            behind.result()
        waiting.append(begun)
        return partial(known, begun)

    def known(begun: PendingIteration) -> tuple[float, float]:
        waiting[:] = [one for one in waiting if one is not begun]
        return LOSS_AND_NORM(begun.result())

    named = run.sharding.model.named_parameters()
    return Loop(
        name="ours", step=step, optimizer=run.optimizer, close=batches.close,
        weights={name: local_part(p.detach()) for name, p in named},
    )  # fmt: skip


def bare(setting: Setting, how: Bare, weights: Mapping[str, Tensor], batches: list[Batch]) -> Loop:
    """A loop from `weights` over `batches`, which lie in the device's memory, again and again."""
    device = setting.ranks.device
    feed = itertools.cycle(list(steps_of(batches, dict(setting.shape)["micro-batches"])))
    if how.hugging_face:
        model, logits_of = hugging_face(setting, weights)
    else:
        model, logits_of = same_layers(setting, weights)
    masters = list(model.parameters())
    if not how.autocast:
        masters = [p.detach().clone() for p in masters]
        model.to(torch.bfloat16)
    loss_of = compiled(how.compiles, model, logits_of)
    around = partial(torch.autocast, device.type, torch.bfloat16) if how.autocast else nullcontext
    optimizer = adamw(masters)
    update = partial(updated, model, masters, optimizer)
    return Loop(
        name=how.name, step=lambda: plain_step(next(feed), loss_of, around, update),
        optimizer=optimizer, weights={}, close=lambda: None,
    )  # fmt: skip


def same_layers(setting: Setting, weights: Mapping[str, Tensor]) -> tuple[nn.Module, Logits]:
    """Our layers in fp32, and what makes logits with them."""
    model = unsharded(setting).to_empty(device=setting.ranks.device)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])
    return model, lambda tokens, positions: model(tokens, position_ids=positions)


def compiled(part: str | None, model: nn.Module, logits_of: Logits) -> Callable[[Batch], Tensor]:
    """The loss of a batch, with each block and the cross-entropy compiled, or all in one."""
    if part == "blocks":
        compile_blocks(model)
    loss_of_logits = torch.compile(cross_entropy) if part == "blocks" else cross_entropy

    def loss_of(tokens: Tensor, labels: Tensor, positions: Tensor) -> Tensor:
        return loss_of_logits(logits_of(tokens, positions), labels)

    run = torch.compile(loss_of) if part == "whole" else loss_of
    return lambda batch: run(batch.tokens, batch.labels, batch.position_ids)


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean loss of logits [B, S, V] in fp32."""
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def plain_step(
    batches: Sequence[Batch],
    loss_of: Callable[[Batch], Tensor],
    around: Callable[[], AbstractContextManager],
    update: Callable[[], Tensor],
) -> Numbers:
    """One step on some micro-batches; gradients add up in the weights' dtype."""
    total = torch.zeros((), device=batches[0].tokens.device)
    for batch in batches:
        with around():
            loss = loss_of(batch)
        (loss / len(batches)).backward()
        total += loss.detach() / len(batches)
    norm = update()
    return lambda: (total.item(), norm.item())


def updated(
    model: nn.Module, masters: list[Tensor], optimizer: torch.optim.Optimizer
) -> Tensor:
    """Clip and update the masters from the model's gradients; returns the gradients' norm."""
    copies = list(model.parameters())
    has_masters = copies[0] is not masters[0]
    if has_masters:
        wide = [torch.empty_like(master) for master in masters]
        torch._foreach_copy_(wide, [copy.grad for copy in copies])
        for copy, master, gradient in zip(copies, masters, wide, strict=True):
            master.grad, copy.grad = gradient, None
    norm = nn.utils.clip_grad_norm_(masters, CLIP, foreach=True)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if has_masters:
        with torch.no_grad():
            torch._foreach_copy_(copies, masters)
    return norm
