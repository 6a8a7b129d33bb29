"""Models that tensor parallelism splits over another axis of ranks than ZeRO."""

import functools
import logging

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tests.ranks import ranks
from tests.zeropp.prescribed_gradients import ALL_THREE, zero_config
from tests.zeropp.small_model import SmallModel, in_parts, loss_of, small_model, tokens_of, whole
from zeropp import InputError, Sharding, optimizer_step, shard
from zeropp.sharding.forecast import node_bytes
from zeropp.sharding.grid import nodes_of_grid
from zeropp.wire.rank_group import Nodes
from zeropp.wire.route import gradient_route, weight_route

INNER, CLIP, STEPS = 20, 0.25, 2
QUANTIZED = {"stage": 3, "zero_quantized_weights": True, "zero_quantized_gradients": True}
NODE_WIDE = QUANTIZED | {"zero_hpz_partition_size": 2}


def grid(data: int, tensor: int) -> DeviceMesh:
    return init_device_mesh("cpu", (data, tensor), mesh_dim_names=("data", "tensor"))


def split(mesh: DeviceMesh) -> SmallModel:
    return in_parts(mesh, INNER)


def train(sharding: Sharding, steps: int = STEPS) -> tuple[list[float], list[float]]:
    """Losses over all ranks, and gradient norms, of steps of two micro-batches, clipped."""
    data = sharding.grid.data
    place, count = (data.get_local_rank(), data.size()) if data is not None else (0, 1)
    optimizer = torch.optim.SGD(sharding.model.parameters(), lr=0.2, momentum=0.9, foreach=False)
    losses, norms = [], []
    for number in range(steps):
        mine = tokens_of(number).chunk(count)[place].chunk(2)
        total = torch.zeros(())
        for index, tokens in enumerate(mine):
            with sharding.micro_step(last=index == 1):
                loss = loss_of(sharding.model, tokens) / 2
                loss.backward()
            total += loss.detach()
        if data is not None:
            dist.all_reduce(total, group=data.get_group())
        losses.append(total.item() / count)
        norms.append(optimizer_step(optimizer, sharding, clip_grad=CLIP).grad_norm)
    return losses, norms


@functools.cache
def expected() -> tuple[list[float], list[float]]:
    return train(shard(small_model(2, INNER), None, zero_config({"stage": 0}, 1)))


@pytest.mark.parametrize(
    ("shape", "stages"), [((2, 2), (0, 1, 2, 3)), ((1, 4), (3,)), ((4, 1), (2,))]
)
@ranks(4)
def test_losses_and_norms_are_those_of_one_process(shape, stages):
    mesh = grid(*shape)
    for stage in stages:
        sharding = shard(split(mesh), mesh, zero_config({"stage": stage}, 2), axis="data")
        losses, norms = train(sharding)
        expected_losses, expected_norms = expected()
        assert losses == pytest.approx(expected_losses, rel=1e-5), stage
        assert norms == pytest.approx(expected_norms, rel=1e-5), stage
        assert max(norms) > CLIP
        gathered = [None] * 4
        gains = [block.norm.weight for block in sharding.model.blocks]
        dist.all_gather_object(gathered, [whole(gain).tolist() for gain in gains])
        assert all(each == gathered[0] for each in gathered), stage


@ranks(4)
def test_a_slice_of_a_mesh_is_as_good_as_its_name():
    mesh = grid(2, 2)
    sharding = shard(split(mesh), mesh["data"], zero_config({"stage": 3}, 2))
    assert train(sharding)[1] == pytest.approx(expected()[1], rel=1e-5)


@ranks(4)
def test_quantized_losses_stay_close_and_bytes_are_those_foretold():
    mesh = grid(2, 2)
    for zero, ranks_per_node in ((ALL_THREE, 2), (QUANTIZED, 4), (NODE_WIDE, 2), (NODE_WIDE, 4)):
        sharding = shard(split(mesh), mesh, zero_config(zero, ranks_per_node), axis="data")
        losses, norms = train(sharding)
        expected_losses, expected_norms = expected()
        assert losses == pytest.approx(expected_losses, rel=2e-3), (zero, ranks_per_node)
        assert norms == pytest.approx(expected_norms, rel=0.05), (zero, ranks_per_node)
        sent = sharding.traffic.take()
        expected_sent = {key: STEPS * n for key, n in sharding.expected_traffic(2).items()}
        assert sent == expected_sent, (zero, ranks_per_node)


@ranks(4)
def test_with_tensor_ranks_filling_the_node_each_keeps_its_part_of_the_weights():
    mesh = grid(2, 2)
    sharding = shard(split(mesh), mesh, zero_config(NODE_WIDE, 2), axis="data")
    assert (
        sharding.plan.units[-1].axis.weights.keeps
        and sharding.plan.units[-1].axis.weights.inner == 1
    )
    train(sharding, steps=2)
    sent = sharding.traffic.take()
    assert sent["weights_backward", "across_nodes"] == 0 < sent["weights_forward", "across_nodes"]
    once = sharding.expected_traffic(1)["weights_forward", "across_nodes"]
    assert sent["weights_forward", "across_nodes"] == 2 * once  # whatever the micro-batches
    rows = dict(sharding.describe())
    assert rows["nodes"] == "2 of 2 ranks"
    everywhere = torch.tensor(sum(sharding.expected_traffic(1).values()))
    dist.all_reduce(everywhere)
    assert sum(node_bytes(sharding.plan).values()) == everywhere.item() / 2


@ranks(4)
def test_frozen_matrices_that_are_split_are_stored_quantized():
    zero = {"stage": 3, "zero_quantized_nontrainable_weights": True}

    def frozen(model: SmallModel) -> SmallModel:
        for block in model.blocks:
            block.up.requires_grad_(False)
            block.down.requires_grad_(False)
        return model

    mesh = grid(2, 2)
    sharding = shard(frozen(split(mesh)), mesh, zero_config(zero, 2), axis="data")
    losses, norms = train(sharding)
    expected_losses, expected_norms = train(
        shard(frozen(small_model(2, INNER)), None, zero_config({"stage": 0}, 1))
    )
    assert losses == pytest.approx(expected_losses, rel=1e-3)
    assert norms == pytest.approx(expected_norms, rel=0.02)


@ranks(4)
def test_a_mesh_of_several_axes_needs_the_name_of_one():
    mesh = grid(2, 2)
    config = zero_config({"stage": 3}, 2)
    with pytest.raises(
        InputError, match=r"mesh has 2 axes, \('data', 'tensor'\): zeropp.shard takes the"
    ):
        shard(split(mesh), mesh, config)
    with pytest.raises(InputError, match="axis='dp': the mesh has the axes data, tensor"):
        shard(split(mesh), mesh, config, axis="dp")


def lines(data: int, tensor: int) -> list[list[int]]:
    return [list(range(first, data * tensor, tensor)) for first in range(tensor)]


@pytest.mark.parametrize(
    ("data", "tensor", "per_node", "in_node", "parts"),
    [(4, 2, 4, 2, 2), (4, 2, 8, 4, 2), (2, 8, 8, 1, 8), (2, 8, 4, 1, 4), (8, 1, 4, 4, 1)],
)
def test_nodes_of_a_grid(data, tensor, per_node, in_node, parts):
    nodes = nodes_of_grid(range(data * tensor), lines(data, tensor), per_node)
    assert nodes == Nodes(num_ranks=data, ranks_per_node=in_node, parts=parts)


def test_lines_that_are_spread_differently_are_refused():
    with pytest.raises(InputError, match="6 ranks per node: nodes hold different parts"):
        nodes_of_grid(range(12), [range(6), range(6, 12), range(4, 8)], 6)


def test_a_partition_counts_the_ranks_of_a_node():
    nodes = Nodes(num_ranks=4, ranks_per_node=2, parts=4)
    route = weight_route(zero_config(QUANTIZED | {"zero_hpz_partition_size": 8}, 8), nodes)
    assert route.inner == 2 and route.keeps
    with pytest.raises(InputError, match="= 2 counts the ranks of a node, and 4 of them hold"):
        weight_route(zero_config(QUANTIZED | {"zero_hpz_partition_size": 2}, 8), nodes)


def test_a_node_of_more_ranks_than_there_are_is_said(caplog):
    caplog.set_level(logging.INFO, "zeropp")
    for per_node in (8, 9):
        nodes = nodes_of_grid(range(8), [range(0, 8, 2), range(1, 8, 2)], per_node)
        gradient_route(zero_config(QUANTIZED, per_node), nodes)
    line = "zeropp.ranks_per_node = 9 exceeds the number of ranks, 8: all ranks form one node"
    assert caplog.messages == [line]
