"""The grid of ranks: the data axis that ZeRO shards over, and the axes beside it.

The axes beside it split a model in other ways, as tensor parallelism does. Sums over a whole model,
such as the norm of its gradients, go over every axis, and a part that several ranks hold counts
once.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import prod
from types import MappingProxyType

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from zeropp.errors import InputError
from zeropp.ranks.groups import explained_waits, inherit_time_limit
from zeropp.ranks.topology import Environment
from zeropp.settings.zero_config import ZeroConfig
from zeropp.wire.rank_group import Nodes


class Grid:
    """The axes over which a model is spread, each by the group of this rank's line of ranks.

    `mesh` is what `zeropp.shard` was given, `data` its data axis. Further axes are found by the
    parameters that are DTensors on them. A parameter that is not, while others are, is taken to be
    the same on all ranks of that axis. `own_meshes` are those of modules whose parameters are on
    other axes of the same ranks: each rank holds another part of them.
    """

    def __init__(
        self,
        model: nn.Module,
        mesh: DeviceMesh | None,
        data: DeviceMesh | None,
        own_meshes: Mapping[nn.Module, DeviceMesh] = MappingProxyType({}),
    ) -> None:
        self.model, self.data = model, data
        self.num_ranks = 1 if mesh is None else mesh.size()
        self._beside: dict[tuple[int, ...], dist.ProcessGroup] = {}
        self._holding: dict[tuple[int, ...], int] = {}  # axes with DTensors -> how many ranks
        self._own_axes = {(each.mesh_dim_names[1], _line(each, 1)) for each in own_meshes.values()}
        data_ranks = () if data is None else ranks_of(data)
        others = {parameter for module in own_meshes for parameter in module.parameters()}
        meshes = dict.fromkeys(
            parameter.device_mesh
            for parameter in model.parameters()
            if isinstance(parameter, DTensor) and parameter not in others
        )
        for each in (mesh, *meshes):
            for axis in range(each.ndim if each is not None else 0):
                ranks = _line(each, axis)
                if len(ranks) > 1 and ranks != data_ranks:
                    self._beside.setdefault(ranks, each.get_group(axis))
                    if each in meshes:
                        self._holding[ranks] = len(ranks)

    def sum(self, total: torch.Tensor, *, over_data: bool) -> torch.Tensor:
        """Add up `total` in place over the axes beside the data axis and, if asked, over that."""
        for group in (*([self.data.get_group()] if over_data else []), *self._beside.values()):
            with explained_waits(group, lambda: "a sum, as of the gradients' norm"):
                dist.all_reduce(total, group=group)
        return total

    def has_own_mesh(self, tensor: torch.Tensor) -> bool:
        """Whether a parameter is one of a module with a mesh of its own, whose ranks split it."""
        if not isinstance(tensor, DTensor) or not self._own_axes:
            return False
        names = enumerate(tensor.device_mesh.mesh_dim_names or ())
        lines = ((name, _line(tensor.device_mesh, axis)) for axis, name in names)
        return not self._own_axes.isdisjoint(lines)

    def num_copies(self, tensor: torch.Tensor) -> int:
        """Return how many ranks beside the data axis hold the same part of a parameter."""
        if not self._holding or self.has_own_mesh(tensor):
            return 1
        copies = 1
        holding = dict(self._holding)
        if isinstance(tensor, DTensor):
            for axis, placement in enumerate(tensor.placements):
                size = holding.pop(_line(tensor.device_mesh, axis), 1)
                copies *= size if placement.is_replicate() else 1
        return copies * prod(holding.values())


def num_replicas(tensor: DTensor) -> int:
    """Return how many ranks of a tensor's mesh hold the same part of it."""
    axes = enumerate(tensor.placements)
    return prod(tensor.device_mesh.size(axis) for axis, each in axes if each.is_replicate())


def data_axis(mesh: DeviceMesh, axis: str | None) -> DeviceMesh:
    """Return the one-axis mesh of the data-parallel ranks.

    Raises InputError unless it is one axis of ascending ranks, this one among them.
    """
    if axis is not None:
        names = mesh.mesh_dim_names or ()
        if axis not in names:
            raise InputError(
                f"axis={axis!r}: the mesh has the axes {', '.join(names) or 'unnamed'}"
            )
        mesh = mesh if mesh.ndim == 1 else mesh[axis]
    elif mesh.ndim != 1:
        raise InputError(
            f"the mesh has {mesh.ndim} axes, {mesh.mesh_dim_names}: zeropp.shard takes the name of "
            'the one of data-parallel ranks, axis="data", and zeropp.initialize a mesh of one axis'
        )
    ranks = ranks_of(mesh)
    if dist.get_rank() not in ranks:
        raise InputError(
            f"rank {dist.get_rank()} is not in the mesh of ranks {list(ranks)}: only these ranks "
            "can shard the model"
        )
    if list(ranks) != sorted(ranks):
        raise InputError(
            f"the mesh has the ranks {list(ranks)}: give them in ascending order, which is that of "
            "PyTorch's process groups"
        )
    return mesh


def find_nodes(mesh: DeviceMesh, config: ZeroConfig, data: DeviceMesh | None = None) -> Nodes:
    """Return which ranks of the data axis share a node: by `zeropp.ranks_per_node`, or as launched.

    Raises InputError on every rank if the nodes have different numbers of ranks, or if the lines
    of ranks along the data axis, by default all of `mesh`, are spread over the nodes in different
    ways.
    """
    groups = [mesh.get_group(axis) for axis in range(mesh.ndim)]
    per_node = _ranks_per_node(groups, mesh.device_type, config)
    nodes = nodes_of_grid(ranks_of(mesh), _lines(mesh, data or mesh), per_node)
    return replace(nodes, machines=Environment.read().machines)


def find_nodes_of(group: dist.ProcessGroup, config: ZeroConfig) -> Nodes:
    """Return which ranks of a group share a node, as far as this rank knows.

    The other ranks of a node are taken to hold other parts of the model. Raises InputError if the
    nodes would have different numbers of the group's ranks.
    """
    per_node = own_ranks_per_node(config)
    nodes = Nodes.of(dist.get_process_group_ranks(group), per_node)
    parts = max(1, per_node // nodes.ranks_per_node)
    return replace(nodes, parts=parts, machines=Environment.read().machines)


def own_ranks_per_node(config: ZeroConfig) -> int:
    """Return how many ranks a node has, by `zeropp.ranks_per_node` or as this one was launched."""
    per_node = config.zeropp.ranks_per_node or Environment.read().local_world_size
    return min(per_node, dist.get_world_size())


def lines_of_ranks(parameters: Iterable[nn.Parameter]) -> list[dist.ProcessGroup]:
    """Return this rank's group along each axis that the parameters are spread over."""
    groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
    meshes = dict.fromkeys(each.device_mesh for each in parameters if isinstance(each, DTensor))
    for mesh in meshes:
        for axis in range(mesh.ndim):
            ranks = _line(mesh, axis)
            if len(ranks) > 1:
                groups.setdefault(ranks, mesh.get_group(axis))
    return [*groups.values()]


def nodes_of_grid(
    ranks: Sequence[int], lines: Sequence[Sequence[int]], ranks_per_node: int
) -> Nodes:
    """Return the nodes of each line of `ranks` along the data axis; all must be alike.

    Raises InputError if they are not.
    """
    nodes = {Nodes.of(line, ranks_per_node): line for line in lines}
    in_nodes = Counter(rank // ranks_per_node for rank in ranks)
    if len(nodes) > 1 or len(set(in_nodes.values())) > 1:
        text = ", ".join(f"{each.ranks_per_node} of {list(line)}" for each, line in nodes.items())
        raise InputError(
            f"{ranks_per_node} ranks per node: nodes hold different parts of the lines of ranks "
            f"along the data axis, {text}: let each node hold whole lines, or equal parts of them"
        )
    (own,) = nodes
    return replace(own, parts=max(in_nodes.values()) // own.ranks_per_node)


def _ranks_per_node(
    groups: Sequence[dist.ProcessGroup], device_type: str, config: ZeroConfig
) -> int:
    """Return how many ranks a node has; raises InputError if the ranks of these groups differ."""
    per_node = own_ranks_per_node(config)
    extremes = torch.tensor([per_node, -per_node], device=device_type)
    for group in groups:
        dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=group)
    most, least = extremes[0].item(), -extremes[1].item()
    if most != least:
        raise InputError(
            f"nodes have different numbers of ranks, {least} to {most}: start the same number on "
            "every node, or set zeropp.ranks_per_node to one that divides them all"
        )
    return per_node


def inherit_time_limits(mesh: DeviceMesh) -> None:
    """Let collectives along a mesh fail after the default group's time limit at the latest."""
    for axis in range(mesh.ndim):
        inherit_time_limit(mesh.get_group(axis))


def device_of(mesh: DeviceMesh | None) -> torch.device:
    """Return this rank's device in a mesh; the CPU without one."""
    if mesh is None or mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.accelerator.current_device_index())


def first_axis(mesh: DeviceMesh) -> DeviceMesh:
    """Return the first axis of a mesh, as a mesh."""
    return mesh[mesh.mesh_dim_names[0]]


def ranks_of(mesh: DeviceMesh) -> tuple[int, ...]:
    """Return the global ranks of a mesh, in its order."""
    return tuple(mesh.mesh.flatten().tolist())


def _line(mesh: DeviceMesh, axis: int) -> tuple[int, ...]:
    """Return the global ranks that differ from this one in their place on an axis alone."""
    return tuple(dist.get_process_group_ranks(mesh.get_group(axis)))


def _lines(mesh: DeviceMesh, data: DeviceMesh) -> Sequence[tuple[int, ...]]:
    """Return the ranks of each line along the data axis of `mesh`, this rank's or others'."""
    if mesh is data:
        return [ranks_of(data)]
    axis = mesh.mesh_dim_names.index(data.mesh_dim_names[0])
    lines = mesh.mesh.movedim(axis, -1).reshape(-1, mesh.size(axis))
    return [tuple(line) for line in lines.tolist()]
