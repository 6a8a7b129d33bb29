"""Engines over the small model, and the plain PyTorch loop that they must equal."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import zeropp
from tests.zeropp.small_model import loss_of, small_model, tokens_of
from zeropp import Engine

LR, CLIP, SAMPLES = 1e-2, 0.5, 8
# PyTorch's, whose numbers do not depend on what is built.
ADAMW = {"type": "AdamW", "params": {"lr": LR, "weight_decay": 0.01, "torch_adam": True}}


def config_of(stage: int = 3, micro_batches: int = 1, **others: Any) -> dict:
    """A JSON of `SAMPLES` samples per step with AdamW, clipping and whatever else is given."""
    return {
        "train_batch_size": SAMPLES,
        "gradient_accumulation_steps": micro_batches,
        "gradient_clipping": CLIP,
        "zero_optimization": {"stage": stage},
        "optimizer": ADAMW,
    } | others


def engine_of(model: nn.Module | None = None, **settings: Any) -> Engine:
    """An engine over the small model; settings are those of `config_of`."""
    model = small_model() if model is None else model
    return zeropp.initialize(model=model, config=config_of(**settings))[0]


def adamw(parameters: Any) -> torch.optim.Optimizer:
    """The optimizer that the JSON of `config_of` names."""
    return torch.optim.AdamW(parameters, lr=LR, weight_decay=0.01, fused=True)


def run(engine: Engine, steps: int = 4, first: int = 0) -> list[float]:
    """Take steps by forward, backward and step; their mean losses over all ranks."""
    micro_batches, losses = engine.gradient_accumulation_steps(), []
    for step in range(first, first + steps):
        mine = tokens_of(step, SAMPLES).chunk(dist.get_world_size())[dist.get_rank()]
        total = 0.0
        for tokens in mine.chunk(micro_batches):
            loss = loss_of(engine, tokens)
            engine.backward(loss)
            engine.step()
            total += loss.item() / micro_batches
        losses.append(total)
    everywhere = torch.tensor(losses, dtype=torch.float64)
    dist.all_reduce(everywhere)
    return (everywhere / dist.get_world_size()).tolist()


def run_without_engine(
    steps: int = 4,
    optimizer_of: Callable[[nn.Module], torch.optim.Optimizer] = lambda m: adamw(m.parameters()),
    model: nn.Module | None = None,
) -> tuple[list[float], list[float], nn.Module]:
    """Losses, gradient norms and the model of a loop in plain PyTorch."""
    model = small_model() if model is None else model
    optimizer, losses, norms = optimizer_of(model), [], []
    for step in range(steps):
        loss = loss_of(model, tokens_of(step, SAMPLES))
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), CLIP).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, norms, model


def gathered_parameters(model: nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter, gathered."""
    weights = {}
    for name, parameter in model.named_parameters():
        with zeropp.zero.GatheredParameters(parameter):
            weights[name] = parameter.detach().clone().as_subclass(torch.Tensor)
    return weights


@contextmanager
def logged(level: int = logging.INFO) -> Iterator[list[str]]:
    """The lines that this rank logs in the block."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    log = logging.getLogger("zeropp")
    before = log.level
    log.addHandler(handler)
    log.setLevel(level)
    try:
        yield lines
    finally:
        log.removeHandler(handler)
        log.setLevel(before)
