"""Compiling blocks before sharding changes nothing, also with quantized gradients."""

import pytest
import torch
from torch import nn

from tests.ranks import ranks
from tests.zeropp.prescribed_gradients import ALL_THREE
from tests.zeropp.sharded_training import evaluate, shard_on_nodes, step
from tests.zeropp.small_model import SmallModel, small_model


def compile_blocks(model: SmallModel) -> None:
    model.blocks = nn.ModuleList(
        [torch.compile(block, backend="eager", fullgraph=True) for block in model.blocks]
    )


def in_place(model: SmallModel) -> None:
    for block in model.blocks:
        block.compile(backend="eager")


def losses(zero: dict, compiled=lambda model: None) -> list[float]:
    model = small_model()
    compiled(model)
    sharding = shard_on_nodes(zero, model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    values: list[float] = []
    for number in range(2):
        values += step(sharding, optimizer, number, micro_batches=2) + [evaluate(sharding)]
    assert sharding.traffic.sent["gradients", "across_nodes"] > 0
    return values


@pytest.mark.parametrize("way", [compile_blocks, in_place], ids=["wrapped", "in place"])
@ranks(4, timeout=180)
def test_compiled_blocks_train_alike(way):
    for zero in (ALL_THREE, {"stage": 2, "zero_quantized_gradients": True}):
        assert losses(zero, way) == losses(zero)
