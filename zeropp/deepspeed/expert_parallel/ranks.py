"""Puts layers whose experts ranks split in the places of a model's experts."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from zeropp.deepspeed.expert_parallel.fused_experts import SIZE, find_experts
from zeropp.deepspeed.expert_parallel.layer import ExpertParallel, ExpertRanks
from zeropp.errors import InputError
from zeropp.ranks.groups import shared_group
from zeropp.settings.zero_config import ZeroConfig
from zeropp.sharding.grid import inherit_time_limits, own_ranks_per_node, ranks_of
from zeropp.wire.rank_group import AXES, Nodes, RankGroup
from zeropp.wire.traffic import Traffic

AXIS_NAMES = ("expert_data", "expert")


@dataclass(frozen=True, kw_only=True)
class SplitExperts:
    """Layers with the mesh of their experts, and the ledger of the tokens that this rank sends.

    `lines` say what splits what.
    """

    meshes: dict[nn.Module, DeviceMesh] = field(default_factory=dict)
    traffic: Traffic = field(default_factory=partial(Traffic, AXES))
    lines: tuple[str, ...] = ()


def split(
    model: nn.Module, found: Mapping[str, nn.Module], mesh: DeviceMesh, config: ZeroConfig
) -> SplitExperts:
    """Put a layer of split experts in the place of each of those found, with whole parameters.

    Consecutive ranks of the data axis `mesh` split them. `zeropp.shard` keeps this rank's part.
    """
    if not found:
        return SplitExperts()
    size, ranks = config.expert_ranks, ranks_of(mesh)
    place = mesh.get_local_rank()
    lines = {
        "expert_data": ranks[place % size :: size],
        "expert": ranks[place // size * size :][:size],
    }
    grid = DeviceMesh.from_group(
        [shared_group(name, lines[name], ranks) for name in AXIS_NAMES],
        mesh.device_type,
        mesh=mesh.mesh.view(-1, size),
        mesh_dim_names=AXIS_NAMES,
    )
    inherit_time_limits(grid)
    world = dist.get_world_size()
    traffic = Traffic(AXES)
    group = RankGroup(
        members=tuple(lines["expert"]),
        position=dist.get_rank(),
        nodes=Nodes(num_ranks=world, ranks_per_node=own_ranks_per_node(config)),
        purpose="expert",
        ledger=traffic,
        group=grid.get_group("expert"),
    )
    result = SplitExperts(traffic=traffic, lines=(_line(found, group),))
    for path, experts in found.items():
        layer = ExpertParallel(experts, ExpertRanks(group))
        model.set_submodule(path, layer)
        result.meshes[layer] = grid
    return result


def experts_to_split(
    model: nn.Module, mesh: DeviceMesh, config: ZeroConfig
) -> dict[str, nn.Module]:
    """Return the experts of a model's layers if ranks are to split them; changes nothing.

    Raises InputError unless equal groups of ranks of the data axis `mesh`, in nodes or of nodes,
    can.
    """
    if config.expert_ranks == 1:
        return {}
    size, per_node = config.expert_ranks, own_ranks_per_node(config)
    if mesh.size() % size:
        raise InputError(
            f"{SIZE} = {size} and {mesh.size()} ranks: choose a number that divides the ranks"
        )
    if per_node % size and size % per_node:
        raise InputError(
            f"{SIZE} = {size} and {per_node} ranks per node: some experts would be split in a node "
            "and others across two; choose a number that divides the ranks of a node, or a "
            "multiple of these"
        )
    return find_experts(model, size)


def _line(found: Mapping[str, nn.Module], group: RankGroup) -> str:
    numbers = sorted({each.num_experts for each in found.values()})
    experts = " or ".join(map(str, numbers))
    return (
        f"experts: {group.size} ranks {group.where} split the {experts} experts of each of "
        f"{len(found)} layers, and send each other tokens in the format of computing"
    )
