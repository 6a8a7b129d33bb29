"""The forecast of the traffic: for shapes that can be counted by hand, and beside the calls."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils._python_dispatch import TorchDispatchMode

import zeropp
from tests.ranks import ranks
from zeropp.fsdp_adapter import ShardSpec
from zeropp.sharding.forecast import node_bytes, rank_bytes
from zeropp.sharding.plan import DataAxis, Plan, UnitPlan
from zeropp.wire.rank_group import Nodes, everyone
from zeropp.wire.route import Route

BLOCK, ROOT = 3 * 256, 256  # elements of a rank's shard


def plan_of(nodes: Nodes, inner: int, **settings: object) -> Plan:
    """Two blocks and a root, each of one matrix, in bf16."""
    axis = DataAxis(
        group=everyone(nodes, 0),
        weights=Route(nodes=nodes, inner=inner, **settings),
        gradients=Route(nodes=nodes, inner=nodes.ranks_per_node, bits=(8, 4)),
        num_losses=nodes.num_ranks,
    )
    units = tuple(
        UnitPlan(
            specs=(ShardSpec(elements=size, row=size, ndim=2, trainable=True),),
            axis=axis,
            dtype=torch.bfloat16,
            wire_dtype=torch.bfloat16,
            is_root=size == ROOT,
            regathers=size != ROOT,
        )
        for size in (BLOCK, BLOCK, ROOT)
    )
    return Plan(
        stage=3,
        reduces_once=False,
        keeps_roots=False,
        compute_dtype=torch.bfloat16,
        units=units,
    )


def bytes_across_nodes(sent: dict) -> float:
    return sum(num_bytes for (_, hop), num_bytes in sent.items() if hop == "across_nodes")


@pytest.mark.parametrize("num_micro_batches", [1, 3])
def test_plain_zero_3_is_three_rings_in_16_bit(num_micro_batches):
    nodes = Nodes(num_ranks=8, ranks_per_node=2)
    plain = plan_of(nodes, 2, bits=(8, 8), keeps=True).plain()
    # A ring over 8 ranks passes 7 shards over each of its links; one link leaves each node.
    # Blocks: gathered twice, reduced once; root: gathered once, reduced once. 2 bytes each.
    link = 7 * 2 * (2 * 3 * BLOCK + 2 * ROOT) * num_micro_batches
    sent = node_bytes(plain, num_micro_batches)
    assert bytes_across_nodes(sent) == link
    assert sum(sent.values()) == 2 * link  # the other of a node's two links stays inside


def test_gradients_that_are_reduced_once_do_not_grow_with_the_micro_batches():
    each_time = plan_of(Nodes(num_ranks=8, ranks_per_node=2), 2, bits=(8, 8), keeps=True)
    one, two = (rank_bytes(replace(each_time, reduces_once=True), count) for count in (1, 2))
    for key in (("gradients", hop) for hop in ("in_node", "across_nodes")):
        assert 0 < one[key] == two[key] == rank_bytes(each_time, 2)[key] / 2


def test_a_node_is_the_mean_of_all_nodes_where_hops_straddle_them():
    nodes = Nodes(num_ranks=6, ranks_per_node=2)
    plan = plan_of(nodes, 3, bits=(8, 8), keeps=True)  # groups 0-2 and 3-5, nodes of two
    by_rank = [rank_bytes(plan, position=position) for position in range(6)]
    by_node = [
        bytes_across_nodes(by_rank[n]) + bytes_across_nodes(by_rank[n + 1]) for n in (0, 2, 4)
    ]
    assert len(set(by_node)) > 1
    assert bytes_across_nodes(node_bytes(plan)) == sum(by_node) / 3


class CountedCalls(TorchDispatchMode):
    """Counts what this rank sends in the collectives of `group`, whoever calls them.

    Rings: a gather sends each rank's part to W-1 others, a reduction W-1 of the W parts.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.ranks, self.num_bytes = dist.get_process_group_ranks(group), 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        size = len(self.ranks)
        share = {
            "c10d::_allgather_base_": size - 1,
            "c10d::_reduce_scatter_base_": (size - 1) / size,
            "c10d::alltoall_base_": (size - 1) / size,
        }.get(func._schema.name)
        if share is not None:
            _, sent, group, *_ = args
            assert dist.get_process_group_ranks(dist.ProcessGroup.unbox(group)) == self.ranks
            self.num_bytes += share * sent.nbytes
        return func(*args, **(kwargs or {}))


@ranks(4)
def test_beside_tensor_parallelism_attached_and_plain_fsdp2_send_what_is_told():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    inputs, counted = torch.randn(3, 16), []
    for attaches in (False, True):
        torch.manual_seed(1)
        layers = [nn.Linear(16, 32), nn.Linear(32, 16), nn.LayerNorm(16)]
        model = nn.Sequential(nn.Sequential(*layers), nn.Linear(16, 6))
        plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
        for part in (parallelize_module(model[0], mesh["tensor"], plan), model):
            fully_shard(part, mesh=mesh["data"])
        attached = None
        if attaches:
            json = {"zero_optimization": {"stage": 3}, "zeropp": {"ranks_per_node": 2}}
            attached = zeropp.attach(model, json)
        with CountedCalls(mesh.get_group("data")) as calls:
            model(inputs).sum().backward()
        counted.append(calls.num_bytes)
    assert counted[0] == sum(attached.plain_traffic().values()) > 0
    assert counted[1] == sum(attached.traffic.take().values())
    assert counted[1] == sum(attached.expected_traffic().values())
    with torch.no_grad():
        model(inputs)  # an evaluation is no part of a step
    forward = {key: n for key, n in attached.expected_traffic().items() if "forward" in key[0]}
    assert sum(attached.traffic.take().values()) == sum(forward.values())
