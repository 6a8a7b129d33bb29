"""Steps of optimizers that hold frozen weights, no shards, or nothing of the model."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.ranks import ranks
from tests.zeropp.sharded_training import (
    BOTH,
    QWZ,
    evaluate,
    load_random_weights,
    shard_on_nodes,
    step,
)
from tests.zeropp.small_model import loss_of, small_model, tokens_of


@pytest.mark.parametrize("zero", [BOTH, {"stage": 2}])
@ranks(4)
def test_an_optimizer_of_one_rank_alone_does_not_part_the_ranks(zero):
    """A rank fits a model of its own, sharded over no ranks, while others do not."""
    sharding, probe = shard_on_nodes(zero, small_model()), nn.Linear(2, 1)
    optimizer = torch.optim.SGD(sharding.model.parameters(), lr=0.5)
    own = torch.optim.SGD(probe.parameters(), lr=0.5)

    def losses(*, alone: bool) -> Iterator[float]:
        load_random_weights(sharding, 1)
        for number in range(2):
            yield evaluate(sharding)
            with torch.no_grad():
                loss_of(sharding.model, tokens_of(5))  # leaves weights gathered
            if alone and dist.get_rank() == 1:
                probe(torch.ones(2)).sum().backward()
                own.step()
            yield from step(sharding, optimizer, number, micro_batches=2)

    assert [*losses(alone=True)] == [*losses(alone=False)]


@ranks(4)
def test_weights_that_are_copied_from_an_optimizer_of_plain_tensors_are_seen():
    """Their masters are no shards, and are written back in a way that raises no version."""

    def losses(zero: dict) -> list[float]:
        sharding = shard_on_nodes(zero, small_model())
        weights = [*sharding.model.parameters()]
        masters = [weight.to_local().detach().clone() for weight in weights]
        optimizer = torch.optim.SGD(masters, lr=0.5)
        values = []
        for number in range(2):
            with sharding.micro_step(last=True):
                loss_of(sharding.model, tokens_of(number)).backward()
            for weight, master in zip(weights, masters, strict=True):
                master.grad, weight.grad = weight.grad.to_local(), None
            optimizer.step()
            for weight, master in zip(weights, masters, strict=True):
                weight.to_local().data.copy_(master)
            values.append(evaluate(sharding))
        return values

    assert losses(BOTH) == losses(QWZ)
