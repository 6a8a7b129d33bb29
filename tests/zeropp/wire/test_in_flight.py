"""Gradients that are read or written while reductions are in flight equal those of one process."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from tests.ranks import ranks
from tests.zeropp.prescribed_gradients import data_mesh, zero_config
from tests.zeropp.small_model import HIDDEN_SIZE, Block
from zeropp import Sharding, shard

NEAR = 2e-5  # of the largest element: sums of a few fp32 terms in another order
ROUTES = pytest.mark.parametrize("ranks_per_node", [2, 4])  # two hops, one hop
STAGES_AND_ROUTES = pytest.mark.parametrize(
    ("stage", "ranks_per_node"), [(0, 2), (1, 4), (2, 2), (3, 2), (3, 4)]
)


class Stack(nn.Module):
    """Blocks in a list, run in the given order; a block may come several times."""

    def __init__(self, order: tuple[int, ...]) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.ModuleList(Block() for _ in range(max(order) + 1))
        self.order = order

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index in self.order:
            x = self.blocks[index](x)
        return x


def inputs(rank: int, micro_batch: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * rank + micro_batch)
    return torch.randn(4, HIDDEN_SIZE, generator=generator)


def expected_gradients(model: nn.Module, micro_batches: int, penalty: float = 0.0) -> list:
    """The gradients of one process that runs the micro-batches of all ranks."""
    world = dist.get_world_size()
    for rank in range(world):
        for index in range(micro_batches):
            model(inputs(rank, index)).square().mean().div(world).backward()
    for parameter in model.parameters():
        parameter.grad += 2 * penalty * micro_batches * parameter.detach()
    return [parameter.grad for parameter in model.parameters()]


def require_equal(sharding: Sharding, expected: list[torch.Tensor]) -> None:
    for (name, parameter), gradient in zip(
        sharding.model.named_parameters(), expected, strict=True
    ):
        error = (parameter.grad.full_tensor() - gradient).abs().max()
        assert error <= NEAR * gradient.abs().max(), (name, error)


def sharded(model: nn.Module, stage: int, ranks_per_node: int) -> Sharding:
    return shard(model, data_mesh(), zero_config({"stage": stage}, ranks_per_node))


@STAGES_AND_ROUTES
@ranks(4)
def test_two_forward_passes_before_one_backward(stage: int, ranks_per_node: int):
    expected = expected_gradients(Stack((0, 1)), 2)
    sharding = sharded(Stack((0, 1)), stage, ranks_per_node)
    with sharding.micro_step(last=True):
        losses = [
            sharding.model(inputs(dist.get_rank(), index)).square().mean() for index in range(2)
        ]
        sum(losses).backward()
    require_equal(sharding, expected)


@ROUTES
@ranks(4)
def test_a_hook_that_reads_an_earlier_gradient(ranks_per_node: int):
    order = (0, 1, 2)
    sharding = sharded(Stack(order), 3, ranks_per_node)
    weight, values = sharding.model.blocks[2].down.weight, []

    def read(*_: object) -> None:
        values.append(weight.grad.to_local().clone())

    sharding.model.blocks[0].norm.register_full_backward_hook(read)
    with sharding.micro_step(last=True):
        x = inputs(dist.get_rank(), 0).requires_grad_()
        sharding.model(x).square().mean().backward()
    require_equal(sharding, expected_gradients(Stack(order), 1))
    assert len(values) == 1 and torch.equal(values[0], weight.grad.to_local())
    assert type(weight.grad.to_local()) is torch.Tensor


@ranks(4)
def test_gradients_are_plain_tensors_after_the_pass():
    sharding = sharded(Stack((0, 1)), 2, 2)
    for index in range(2):
        with sharding.micro_step(last=index == 1):
            loss = sharding.model(inputs(dist.get_rank(), index))
            F.mse_loss(loss, torch.zeros_like(loss)).backward()
        sharding.release()
        kinds = {type(weight.grad._local_tensor) for weight in sharding.model.parameters()}
        assert kinds == {torch.Tensor}
