"""Gradients that are read or written while reductions are in flight equal those of one process."""

from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.ranks import ranks
from tests.zeropp.prescribed_gradients import data_mesh, zero_config
from tests.zeropp.small_model import loss_of, small_model, tokens_of
from zeropp import Sharding, shard

NEAR = 2e-5  # of the largest element: sums of a few fp32 terms in another order
ROUTES = pytest.mark.parametrize("ranks_per_node", [2, 4])  # two hops, one hop
STAGES_AND_ROUTES = pytest.mark.parametrize(
    ("stage", "ranks_per_node"), [(0, 2), (1, 4), (2, 2), (3, 2), (3, 4)]
)


def loss(model: nn.Module, rank: int, micro_batch: int) -> torch.Tensor:
    return loss_of(model, tokens_of(10 * rank + micro_batch))


def expected_gradients(num_blocks: int, micro_batches: int) -> list[torch.Tensor]:
    """The gradients of one process that runs the micro-batches of all ranks."""
    model, world = small_model(num_blocks), dist.get_world_size()
    for rank, index in product(range(world), range(micro_batches)):
        loss(model, rank, index).div(world).backward()
    return [parameter.grad for parameter in model.parameters()]


def require_equal(sharding: Sharding, expected: list[torch.Tensor]) -> None:
    for (name, parameter), gradient in zip(
        sharding.model.named_parameters(), expected, strict=True
    ):
        error = (parameter.grad.full_tensor() - gradient).abs().max()
        assert error <= NEAR * gradient.abs().max(), (name, error)


def sharded(num_blocks: int, stage: int, ranks_per_node: int) -> Sharding:
    config = zero_config({"stage": stage}, ranks_per_node)
    return shard(small_model(num_blocks), data_mesh(), config)


@STAGES_AND_ROUTES
@ranks(4)
def test_two_forward_passes_before_one_backward(stage: int, ranks_per_node: int):
    sharding = sharded(2, stage, ranks_per_node)
    with sharding.micro_step(last=True):
        sum(loss(sharding.model, dist.get_rank(), index) for index in range(2)).backward()
    require_equal(sharding, expected_gradients(2, 2))


@ROUTES
@ranks(4)
def test_a_hook_that_reads_an_earlier_gradient(ranks_per_node: int):
    sharding = sharded(3, 3, ranks_per_node)
    weight, values = sharding.model.blocks[2].down.weight, []

    def read(*_: object) -> None:
        values.append(weight.grad.to_local().clone())

    sharding.model.blocks[0].norm.register_full_backward_hook(read)
    with sharding.micro_step(last=True):
        loss(sharding.model, dist.get_rank(), 0).backward()
    require_equal(sharding, expected_gradients(3, 1))
    assert len(values) == 1 and torch.equal(values[0], weight.grad.to_local())
    assert type(weight.grad.to_local()) is torch.Tensor


@ranks(4)
def test_gradients_are_plain_tensors_after_the_pass():
    sharding = sharded(2, 2, 2)
    for index in range(2):
        with sharding.micro_step(last=index == 1):
            loss(sharding.model, dist.get_rank(), index).backward()
        sharding.release()
        kinds = {type(weight.grad._local_tensor) for weight in sharding.model.parameters()}
        assert kinds == {torch.Tensor}
