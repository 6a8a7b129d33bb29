"""Blocks compiled before sharding, either way: the same training, quantized gradients included."""

import pytest
import torch
from torch import nn

from tests.ranks import ranks
from tests.zeropp.given import ALL_THREE
from tests.zeropp.stack import Stack, fresh_stack
from tests.zeropp.stepping import evaluate, sharded, step


def wrapped(model: Stack) -> None:
    model.blocks = nn.ModuleList(
        [torch.compile(one, backend="eager", fullgraph=True) for one in model.blocks]
    )


def in_place(model: Stack) -> None:
    for block in model.blocks:
        block.compile(backend="eager")


def losses(zero: dict, compiled=lambda model: None) -> list[float]:
    model = fresh_stack()
    compiled(model)
    sharding = sharded(zero, model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    found: list[float] = []
    for number in range(3):
        found += step(sharding, optimizer, number, micro_batches=2) + [evaluate(sharding)]
    assert sharding.traffic.sent["gradients", "across_nodes"] > 0
    return found


@pytest.mark.parametrize("way", [wrapped, in_place], ids=["wrapped", "in place"])
@ranks(4, timeout=180)
def test_compiled_blocks_train_alike(way):
    for zero in (ALL_THREE, {"stage": 2, "zero_quantized_gradients": True}):
        assert losses(zero, way) == losses(zero)
