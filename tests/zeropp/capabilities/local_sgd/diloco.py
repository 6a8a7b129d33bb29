"""Streaming DiLoCo of all nodes in one process, in plain PyTorch, to compare with."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Every how many steps nodes exchange, and how (arXiv:2501.18512, algorithm 2)."""

    every: int = 3
    lr: float = 0.7
    momentum: float = 0.5
    fragments: int = 1
    delay: int = 0
    mixing: float = 0.5

    def zeropp(self, bits: int) -> dict:
        """The section of the JSON that says so."""
        return {
            "sync_every": self.every,
            "sync_bits": bits,
            "outer_lr": self.lr,
            "outer_momentum": self.momentum,
            "sync_fragments": self.fragments,
            "sync_delay": self.delay,
            "sync_mixing": self.mixing,
        }


@torch.no_grad()
def diloco(
    models: Sequence[nn.Module],
    train: Callable[[int, int], None],
    steps: int,
    recipe: Recipe,
    cut: Sequence[Sequence[str]],
) -> None:
    """Train one model of each node; `train(node, step)` takes an inner step, `cut` has names.

    Buffers are exchanged with the last part of the weights: floats are averaged without an outer
    optimizer; of integers all take those of the first node, unless they are mixed.
    """
    weights = [dict(model.named_parameters()) for model in models]
    buffers = [dict(model.named_buffers()) for model in models]
    agreed = {name: each.clone() for name, each in weights[0].items()}
    velocity = {name: torch.zeros_like(each) for name, each in agreed.items()}
    coming: dict[int, list[str]] = {}  # by the step after which they come
    for step in range(1, steps + 1):
        for node in range(len(models)):
            with torch.enable_grad():
                train(node, step)
        for number, names in enumerate(cut):
            offset = -(-(number + 1) * recipe.every // recipe.fragments)
            if (step - offset) % recipe.every:
                continue
            for name in names:
                mean = agreed[name] - sum(each[name] for each in weights) / len(models)
                velocity[name] = recipe.momentum * velocity[name] + mean
                agreed[name] = agreed[name] - recipe.lr * (mean + recipe.momentum * velocity[name])
            coming.setdefault(step + recipe.delay, []).extend(names)
            if number == len(cut) - 1:
                for name, first in buffers[0].items():
                    agreed[name] = first.clone()
                    if first.is_floating_point():
                        agreed[name] = sum(each[name] for each in buffers) / len(models)
                    coming[step + recipe.delay].append(name)
        mixing = recipe.mixing if recipe.delay else 0.0
        for name in coming.pop(step, ()):
            if mixing and not agreed[name].is_floating_point():
                continue
            for each in buffers if name in buffers[0] else weights:
                each[name].copy_(mixing * each[name] + (1 - mixing) * agreed[name])
