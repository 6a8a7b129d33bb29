"""Recomputation only changes memory: losses and gradients are bitwise equal, with dropout too."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from megatron_zpp.model.gpt import GPT, Block
from megatron_zpp.model.part import Execution
from megatron_zpp.settings.config import ModelConfig, RecomputeConfig
from tests.megatron_zpp.model.small import GPT2, LLAMA, build, rows

FIVE = replace(GPT2, num_layers=5)
PLANS = {
    "full": RecomputeConfig(recompute_granularity="full"),
    "groups of 2": RecomputeConfig(
        recompute_granularity="full", recompute_method="uniform", recompute_num_layers=2
    ),
    "one group": RecomputeConfig(recompute_granularity="full", recompute_num_layers=9),
    "first 2": RecomputeConfig(
        recompute_granularity="full", recompute_method="block", recompute_num_layers=2
    ),
    "selective": RecomputeConfig(recompute_granularity="selective"),
}


def train(model: nn.Module, steps: int = 2, rank: int = 0) -> tuple[list[float], list]:
    """Losses of some steps, then the local gradients of the last one."""
    data = rows(seed=rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        torch.manual_seed(100 * step + rank)
        loss = model(data[:, :-1], labels=data[:, 1:])
        loss.backward()
        losses.append(loss.item())
        if step < steps - 1:
            optimizer.step()
    gradients = [parameter.grad for parameter in model.parameters()]
    return losses, [getattr(gradient, "_local_tensor", gradient) for gradient in gradients]


def assert_same(first: tuple, second: tuple) -> None:
    assert first[0] == second[0]
    assert all(torch.equal(a, b) for a, b in zip(first[1], second[1], strict=True))


def count_forwards(model: GPT) -> list[int]:
    """Return a list to which each run of a block's `compute` appends the block's number."""
    block_numbers: list[int] = []
    for number, block in enumerate(model.blocks):
        block.mlp.register_forward_pre_hook(lambda *_, number=number: block_numbers.append(number))
    return block_numbers


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS.keys())
@pytest.mark.parametrize("config", [FIVE, replace(LLAMA, num_layers=5)], ids=["gpt2", "llama"])
def test_bitwise(config: ModelConfig, plan: RecomputeConfig) -> None:
    plan.check()
    plain, recomputed = build(config), build(config, execution=Execution(plan))
    assert_same(train(plain), train(recomputed))


@pytest.mark.parametrize(
    ("plan", "expected"),
    [
        ("full", [0, 1, 2, 3, 4, 4, 3, 2, 1, 0]),
        ("groups of 2", [0, 1, 2, 3, 4, 4, 2, 3, 0, 1]),
        ("one group", [0, 1, 2, 3, 4, 0, 1, 2, 3, 4]),
        ("first 2", [0, 1, 2, 3, 4, 1, 0]),
        ("selective", [0, 1, 2, 3, 4]),
    ],
)
def test_blocks_that_run_twice(plan: str, expected: list[int]) -> None:
    model = build(FIVE, execution=Execution(PLANS[plan]))
    block_numbers = count_forwards(model)
    train(model, steps=1)
    assert block_numbers == expected


def compiled_pair(execution: Execution, config: ModelConfig) -> None:
    """Compiled training follows the eager one to round-off, dropout off."""
    config = replace(config, hidden_dropout=0.0, attention_dropout=0.0)
    plain, compiled = build(config), build(config, execution=execution)
    expected, result = train(plain), train(compiled)
    assert result[0] == pytest.approx(expected[0], rel=1e-5)
    for ours, theirs in zip(result[1], expected[1], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("config", [GPT2, LLAMA], ids=["gpt2", "llama"])
def test_compiled_without_breaks(config: ModelConfig) -> None:
    """All blocks share one graph, the loss is another, and neither has graph breaks."""
    torch._dynamo.reset()
    graphs = []

    def backend(graph, example):
        graphs.append(graph)
        return graph

    compiled_pair(Execution(backend=backend), config)
    assert len(graphs) == 2
    torch._dynamo.reset()


@pytest.mark.parametrize("plan", ["full", "groups of 2", "selective"])
def test_compiled_and_recomputed(plan: str) -> None:
    torch._dynamo.reset()
    compiled_pair(Execution(PLANS[plan], "aot_eager"), GPT2)
    torch._dynamo.reset()


def test_modules_and_names_stay() -> None:
    """Recomputation and compilation leave module tree and parameter names as they were."""
    names = [name for name, _ in build(FIVE).named_parameters()]
    model = build(FIVE, execution=Execution(PLANS["full"], "inductor"))
    assert [name for name, _ in model.named_parameters()] == names
    assert all(type(block) is Block for block in model.blocks)
