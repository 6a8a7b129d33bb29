"""hpZ's secondary copies: packed, of any size, reused until the weights change, exact."""

import copy

import pytest
import torch
from torch import nn

from tests.ranks import ranks
from tests.zeropp.prescribed_gradients import data_mesh, zero_config
from tests.zeropp.sharded_training import (
    BOTH,
    QWZ,
    evaluate,
    freeze,
    load_random_weights,
    shard_on_nodes,
    step,
)
from tests.zeropp.small_model import SmallModel, loss_of, small_model, tokens_of
from zeropp import Sharding, shard
from zeropp.wire.collectives import weight_layout


@ranks(4)
def test_weights_cross_the_nodes_once_per_step():
    sharding = shard_on_nodes(BOTH)
    optimizer = torch.optim.AdamW(sharding.model.parameters(), lr=1e-2, fused=True)
    once = sharding.expected_traffic(1)["weights_forward", "across_nodes"]
    for number in range(3):
        sharding.traffic.take()
        step(sharding, optimizer, number, micro_batches=4)
        evaluate(sharding)  # crosses once more, for the step that follows too
        sent = sharding.traffic.take()
        assert sent["weights_forward", "across_nodes"] == (2 if number == 0 else 1) * once
        assert sent["weights_backward", "across_nodes"] == 0
        assert sent["weights_backward", "in_node"] > 0


@ranks(4)
def test_evaluation_keeps_no_copy_where_that_is_set():
    sharding = shard_on_nodes(BOTH)
    evaluate(sharding)
    assert sharding.roots[0].kept.nbytes > 0
    fresh = shard_on_nodes(BOTH, zeropp={"secondary_in_evaluation": False})
    evaluate(fresh)
    assert fresh.roots[0].kept.nbytes == 0
    optimizer = torch.optim.SGD(fresh.model.parameters(), lr=0.1)
    fresh.traffic.take()
    step(fresh, optimizer, 0, micro_batches=2)
    assert fresh.traffic.take() == fresh.expected_traffic(2)


def packed_rows(sharding: Sharding) -> list[int]:
    """Bytes of the copy of each unit: the packed rows of both nodes."""
    units = sharding.plan.units
    layouts = [weight_layout(each.specs, each.axis.weights, each.dtype) for each in units]
    return [2 * layout.packed_bytes for layout in layouts]


@ranks(4)
def test_the_copy_is_packed_and_half_of_16_bit():
    torch.manual_seed(0)
    model = SmallModel()
    model.blocks = nn.ModuleList([nn.Linear(512, 512) for _ in range(2)])
    model.forward = lambda x: model.blocks[1](model.blocks[0](x))
    sharding = shard_on_nodes(BOTH, model, bf16={"enabled": True})
    sharding.model(torch.randn(2, 512)).sum().backward()
    assert sharding.roots[0].kept.nbytes == sum(packed_rows(sharding))
    elements = sum(part.elements for unit in sharding.plan.units for part in unit.specs)
    sixteen_bit = 2 * 2 * elements  # of both nodes
    assert sharding.roots[0].kept.nbytes / sixteen_bit == pytest.approx(0.5, abs=0.01)


@ranks(4)
def test_copies_of_frozen_units_survive_steps():
    model = small_model()
    freeze(model.blocks[1])
    sharding = shard_on_nodes(BOTH, model)
    optimizer = torch.optim.AdamW(sharding.model.parameters(), lr=1e-2, fused=True)
    whole = packed_rows(sharding)
    step(sharding, optimizer, 0)
    assert sharding.roots[0].kept.nbytes == whole[1]
    once = sharding.traffic.take()["weights_forward", "across_nodes"]
    step(sharding, optimizer, 1)
    again = sharding.traffic.take()["weights_forward", "across_nodes"]
    assert once - again == whole[1] // 2  # a rank of 2 nodes sends its own row to one other


@ranks(4)
def test_a_frozen_model_crosses_the_nodes_once():
    model = small_model()
    freeze(model)
    sharding = shard_on_nodes(BOTH, model)
    first, across = evaluate(sharding), ("weights_forward", "across_nodes")
    assert sharding.traffic.take()[across] > 0
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    for _ in range(3):
        optimizer.step()
        assert evaluate(sharding) == first
    assert sharding.traffic.take()[across] == 0
    load_random_weights(sharding, 3)
    assert evaluate(sharding) != first


@ranks(4)
def test_nothing_is_compared_where_nothing_would_be_reused():
    sharding = shard_on_nodes(BOTH, small_model())
    optimizer, compared = torch.optim.SGD(sharding.model.parameters(), lr=0.5), []
    comparison = sharding.roots[0].kept._of_any_rank
    sharding.roots[0].kept._of_any_rank = lambda flags: compared.append(flags) or comparison(flags)
    for number in range(3):
        step(sharding, optimizer, number)
    assert not compared
    step(sharding, optimizer, 4, micro_batches=3)
    assert compared == 2 * [[False] * 3]  # as the second and third reuse copies of three units


@ranks(4)
def test_a_part_of_a_sharded_model_can_be_copied():
    """As PEFT copies modules that it saves; the copy does not hold the rest of the model."""
    sharding = shard_on_nodes(BOTH)
    evaluate(sharding), evaluate(sharding)  # ranks have compared what was written
    copied = copy.deepcopy(sharding.model.blocks[0].norm)
    assert torch.equal(copied.weight.full_tensor(), torch.ones(12))


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
