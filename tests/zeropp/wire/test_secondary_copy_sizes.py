"""hpZ's secondary copies among any number of ranks, more than there are included."""

import pytest
import torch

from tests.ranks import ranks
from tests.zeropp.prescribed_gradients import data_mesh, zero_config
from tests.zeropp.sharded_training import QWZ
from tests.zeropp.small_model import loss_of, small_model, tokens_of
from zeropp import shard


@pytest.mark.parametrize(("sizes", "ranks_per_node"), [((1, 3, 6), 2), ((16, 2), 3), ((2,), 1)])
@ranks(6)
def test_any_size_gives_the_same_bits(sizes, ranks_per_node):
    """D2: smaller than a node, larger, across nodes, the world, more than the world."""

    def losses(zero: dict) -> list[float]:
        sharding = shard(small_model(), data_mesh(), zero_config(zero, ranks_per_node))
        optimizer = torch.optim.SGD(sharding.model.parameters(), lr=0.5)
        values = []
        for number in range(2):
            loss = loss_of(sharding.model, tokens_of(number))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            values.append(loss.item())
        sent = sharding.traffic.sent
        assert sent == {key: 2 * n for key, n in sharding.expected_traffic().items()}
        return values

    for zero in ({"stage": 3}, QWZ):
        expected = losses(zero)
        for size in sizes:
            assert losses(zero | {"zero_hpz_partition_size": size}) == expected, (size, zero)
