"""PyTorch training loops for one device, compiled or not, that are timed against ours.

They hold the model in bf16 beside fp32 master weights, or in fp32 under autocast.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.shared.training_setup import CLIP, TrainingSetup
from benchmarks.step.hugging_face_peer import hugging_face
from benchmarks.step.training_loops import (
    LossOf,
    StepNumbers,
    TrainingLoop,
    accumulate,
    adamw,
)
from megatron_zpp.data.loader import Batch
from megatron_zpp.model.execution import Execution
from megatron_zpp.model.gpt import GPT
from megatron_zpp.model.part import WHOLE, Part

Logits = Callable[[Tensor, Tensor], Tensor]  # of tokens and positions [B, S]: [B, S, V]


@dataclass(frozen=True, kw_only=True)
class DeviceLoopKind:
    """How a loop is written."""

    name: str
    autocast: bool = False  # fp32 weights under autocast; else bf16 weights and fp32 masters
    hugging_face: bool = False  # Hugging Face's model, not ours
    compiles: str | None = None  # "blocks" or "whole"


DEVICE_LOOPS = MappingProxyType(
    {
        "blocks": DeviceLoopKind(name="bare loop, compiled blocks", compiles="blocks"),
        "whole": DeviceLoopKind(name="bare loop, compiled whole", compiles="whole"),
        "autocast-blocks": DeviceLoopKind(
            name="bare autocast loop, compiled blocks", autocast=True, compiles="blocks"
        ),
        "autocast-whole": DeviceLoopKind(
            name="bare autocast loop, compiled whole", autocast=True, compiles="whole"
        ),
        "eager": DeviceLoopKind(name="bare loop, not compiled"),
        "hf": DeviceLoopKind(name="Hugging Face, not compiled", hugging_face=True),
        "hf-whole": DeviceLoopKind(
            name="Hugging Face, compiled whole", hugging_face=True, compiles="whole"
        ),
    }
)


def device_loop(
    setup: TrainingSetup,
    kind: DeviceLoopKind,
    weights: Mapping[str, Tensor],
    steps: Sequence[Sequence[Batch]],
) -> TrainingLoop:
    """A loop from `weights` over `steps`, which stay in the device's memory, again and again."""
    device, endless_steps = setup.ranks.device, itertools.cycle(steps)
    if kind.hugging_face:
        model, logits_of = hugging_face(setup, weights)
    else:
        model, logits_of = _same_layers(setup, weights, kind.compiles)
    masters = list(model.parameters())
    if not kind.autocast:
        masters = [parameter.detach().clone() for parameter in masters]
        model.to(torch.bfloat16)
    loss_of = compiled_loss(kind.compiles, logits_of)
    optimizer = adamw(masters)

    def autocast_loss_of(batch: Batch) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=kind.autocast):
            return loss_of(batch)

    def step() -> StepNumbers:
        loss = accumulate(next(endless_steps), autocast_loss_of)
        norm = _update(model, masters, optimizer)
        return lambda: (loss.item(), norm.item())

    return TrainingLoop(name=kind.name, model=model, optimizer=optimizer, step=step)


def compiled_loss(part: str | None, logits_of: Logits) -> LossOf:
    """The loss of a batch, with the cross-entropy compiled beside the blocks, or all in one."""
    loss_of_logits = torch.compile(_cross_entropy) if part == "blocks" else _cross_entropy

    def loss_of(tokens: Tensor, labels: Tensor, positions: Tensor) -> Tensor:
        return loss_of_logits(logits_of(tokens, positions), labels)

    run = torch.compile(loss_of) if part == "whole" else loss_of
    return lambda batch: run(batch.tokens, batch.labels, batch.position_ids)


def _same_layers(
    setup: TrainingSetup, weights: Mapping[str, Tensor], compiles: str | None
) -> tuple[nn.Module, Logits]:
    """Our layers in fp32, the blocks compiled if asked, and a function that computes logits."""
    part = Part(execution=Execution(backend="inductor")) if compiles == "blocks" else WHOLE
    with torch.device("meta"):
        model = GPT(setup.config.model, setup.vocab_size, part)
    model.to_empty(device=setup.ranks.device)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])
    return model, lambda tokens, positions: model(tokens, position_ids=positions)


def _cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean loss of logits [B, S, V] in fp32."""
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def _update(model: nn.Module, masters: list[Tensor], optimizer: torch.optim.Optimizer) -> Tensor:
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
