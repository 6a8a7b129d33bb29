"""Where a rank is among all ranks of a run, which of them share its work, and their mesh.

    rank = ((p * R + replica) * C + c) * T + t        Megatron's order: tensor ranks fastest

R replicas see different samples. C context ranks that share each sequence are a run of the data
axis, as weights and gradients go over both alike. p is the place in a pipeline. The mesh has the
axis `data`, `pipe` where layers and `tensor` where matrices are split. Ranks of a node are
consecutive. The mesh is built once and passed as a value.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property, partial
from types import MappingProxyType
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from megatron_zpp.parallel.heartbeat import MainThread
from megatron_zpp.parallel.replicas import Joining, Replicas
from megatron_zpp.settings.config import ParallelConfig
from zeropp.ranks import (
    Environment,
    fail_together,
    pick_device,
    require_same,
    set_time_limit,
    shared_group,
    start_process_group,
    time_limit,
)
from zeropp.wire import AXES, Nodes, RankGroup, Traffic

SAME_COMMAND = (
    "start all ranks with the same command line, the same JSON and the same versions; only paths "
    "may differ between machines"
)

Result = TypeVar("Result")


class RankGrid(ABC):
    """This rank on the grid of all ranks of a run, which has started or is planned.

    rank: its number. context_size: consecutive ranks of the data axis that share each sequence.
    """

    rank: int
    context_size: int

    @property
    @abstractmethod
    def grid(self) -> torch.Tensor:
        """All ranks, [P, D, T]: by their places on the pipeline, the data and the tensor axis."""

    @abstractmethod
    def rank_group(self, purpose: str, members: Sequence[int]) -> RankGroup:
        """Return ranks, this one among them, as a group for one of `AXES`."""

    @cached_property
    def places(self) -> tuple[int, int, int]:
        """This rank's indices on the axes of the grid."""
        return tuple((self.grid == self.rank).nonzero()[0].tolist())

    @property
    def num_ranks(self) -> int:
        return self.grid.numel()

    @property
    def tensor_size(self) -> int:
        """How many ranks share each matrix."""
        return self.grid.shape[2]

    @property
    def pipeline_size(self) -> int:
        """How many ranks share the layers."""
        return self.grid.shape[0]

    @property
    def data_parallel_size(self) -> int:
        """How many ranks, or groups of ranks that share their work, see different samples."""
        return self.grid.shape[1] // self.context_size

    @property
    def tensor_rank(self) -> int:
        """The index of this rank on the tensor axis: which part of each matrix it has."""
        return self.places[2]

    @property
    def pipeline_rank(self) -> int:
        """The index of this rank in its pipeline."""
        return self.places[0]

    @property
    def data_parallel_rank(self) -> int:
        """The data-parallel index of this rank, the same on ranks that share their work."""
        return self.places[1] // self.context_size

    @property
    def context_rank(self) -> int:
        """Which part of its sequences this rank has."""
        return self.places[1] % self.context_size

    @cached_property
    def pipeline(self) -> tuple[int, ...]:
        """The ranks that share the layers with this one, by their places."""
        _, data, tensor = self.places
        return tuple(self.grid[:, data, tensor].tolist())

    @property
    def tensor_group(self) -> RankGroup:
        """The ranks that share each matrix with this one."""
        pipe, data, _ = self.places
        return self.rank_group("tensor", self.grid[pipe, data].tolist())

    @property
    def context_group(self) -> RankGroup:
        """The ranks that share each sequence with this one."""
        pipe, _, tensor = self.places
        first = self.data_parallel_rank * self.context_size
        members = self.grid[pipe, first : first + self.context_size, tensor]
        return self.rank_group("context", members.tolist())

    @property
    def ends_of_pipeline(self) -> RankGroup:
        """The first and the last rank of the pipeline; this rank is one of them."""
        return self.rank_group("pipeline", (self.pipeline[0], self.pipeline[-1]))

    def stage_mesh(self, names: tuple[str, str], size: int) -> DeviceMesh | None:
        """Return the mesh of this rank's stage whose last axis has `size` consecutive ranks; None
        where ranks are only planned. All ranks of a run call it."""
        return None


@dataclass(frozen=True, kw_only=True)
class Ranks(RankGrid):
    """This process among the ranks of a run: its environment, device, mesh, and shared store.

    `main_thread` is marked where all ranks go on, so that others notice when this one does not.
    """

    environment: Environment
    device: torch.device
    mesh: DeviceMesh
    store: dist.Store
    context_size: int = 1
    ranks_per_node: int | None = None  # as launched if None
    replicas: Replicas = field(default_factory=Replicas)
    activations: Traffic = field(default_factory=partial(Traffic, AXES))  # what this rank has sent
    main_thread: MainThread = field(default_factory=MainThread)

    @property
    def rank(self) -> int:
        return self.environment.rank

    @property
    def global_rank(self) -> int:
        """This rank's number among those of all replicas."""
        return self.replicas.index * self.num_ranks + self.rank

    @property
    def world_size(self) -> int:
        """How many ranks all replicas have."""
        return self.replicas.count * self.num_ranks

    @property
    def planned_parts(self) -> int:
        """Into how many parts the global batch is divided that the flags name."""
        return self.replicas.planned * self.data_parallel_size

    @property
    def num_parts(self) -> int:
        """Into how many parts a global batch is divided, those of other replicas included."""
        return self.replicas.count * self.data_parallel_size

    @property
    def part(self) -> int:
        """The index of this rank's part among `num_parts`."""
        return self.replicas.index * self.data_parallel_size + self.data_parallel_rank

    @cached_property
    def grid(self) -> torch.Tensor:
        """All ranks, [P, D, T]."""
        return self.mesh.mesh.view(self._size("pipe"), -1, self._size("tensor"))

    @cached_property
    def data(self) -> DeviceMesh:
        """The ranks that hold the same parts of the model's matrices, and see different samples."""
        return self.mesh["data"] if self.mesh.ndim > 1 else self.mesh

    @property
    def nodes(self) -> Nodes:
        """The nodes of all ranks, wherever they are in the mesh."""
        per_node = self.ranks_per_node or self.environment.local_world_size
        return Nodes(num_ranks=self.num_ranks, ranks_per_node=per_node)

    def rank_group(
        self, purpose: str, members: Sequence[int], name: str | None = None
    ) -> RankGroup:
        """Return ranks, this one among them, as a group for one of `AXES`.

        `name` tells groups of the same ranks apart.
        """
        (pipe, data, tensor), mesh = self.places, None
        if purpose == "tensor":
            mesh, group = self.mesh["tensor"], self.mesh.get_group("tensor")
        else:
            lines = {
                "context": self.grid[pipe, :, tensor],
                "pipeline": self.grid[:, data, tensor],
            }
            line = lines.get(purpose, self.grid[pipe].flatten()).tolist()
            group = shared_group(name or purpose, sorted(members), line)
        return RankGroup(
            members=tuple(dist.get_process_group_ranks(group)),
            position=self.rank,
            nodes=self.nodes,
            purpose=purpose,
            ledger=self.activations,
            group=group,
            mesh=mesh,
        )

    def stage_mesh(self, names: tuple[str, str], size: int) -> DeviceMesh:
        """Return the mesh of this rank's stage whose last axis has `size` consecutive ranks."""
        shape = self.pipeline_size, self.num_ranks // self.pipeline_size // size, size
        mesh = init_device_mesh(self.device.type, shape, mesh_dim_names=("pipe", *names))
        limit = time_limit(self.data.get_group())
        for axis in names:
            set_time_limit(mesh.get_group(axis), limit)
        return mesh[names]

    def sharing(self) -> dict[str, tuple[int, ...]]:
        """Return the ranks that share something with this one, by what they share."""
        axes = {}
        if self.tensor_size > 1:
            axes["each matrix"] = self.tensor_group.members
        if self.context_size > 1:
            axes["each sequence"] = self.context_group.members
        if self.pipeline_size > 1:
            axes["the layers"] = self.pipeline
        return axes

    @property
    def num_losses(self) -> int:
        """How many ranks compute a loss: those at the end of a pipeline."""
        return self.num_ranks // self.pipeline_size

    @property
    def asynchronous(self) -> bool:
        """Whether the device computes while the host continues."""
        return self.device.type != "cpu"

    def sum(self, *values: float) -> list[float]:
        """Return each value summed over all ranks in fp64, with one collective of CPU tensors."""
        return self.sum_tensor(torch.tensor(values, dtype=torch.float64)).tolist()

    def sum_over_replicas(self, *values: float) -> list[float]:
        """Return `sum` over the ranks of all replicas that do the same beside their steps."""
        return self.replicas.sum(*self.sum(*values))

    def sum_tensor(self, values: torch.Tensor) -> torch.Tensor:
        """Return a tensor, on this rank's device or CPU, summed over all ranks in fp64."""
        total = values.to(torch.float64, copy=True)
        if self.num_ranks > 1:
            dist.all_reduce(total)
        return total

    def rank_zero_first(self, build: Callable[[], Result]) -> Result:
        """Return `build()`, called on rank 0 first so that the others find what it has cached.

        An error on one rank is raised on all.
        """
        result = None
        with fail_together():
            if self.rank == 0:
                result = build()
        with fail_together():
            return result if self.rank == 0 else build()

    def _size(self, axis: str) -> int:
        names = self.mesh.mesh_dim_names
        return self.mesh.size(names.index(axis)) if axis in names else 1


def join_ranks(
    environment: Environment,
    config: ParallelConfig,
    ranks_per_node: int | None = None,
    settings: Mapping[str, str] = MappingProxyType({}),
    joining: Joining | None = None,
) -> Ranks:
    """Start the process group and build the mesh of all ranks that the configuration names.

    With `joining`, these may be the ranks of one replica of several. Raises InputError on all ranks
    if they do not have the same `settings`, texts by their names.
    """
    device, joining = pick_device(environment), joining or Joining(world=environment)
    timeout = timedelta(minutes=config.distributed_timeout_minutes)
    world, backend = joining.world, config.distributed_backend
    store = start_process_group(environment, device, timeout, backend, world=world)
    require_same(settings, SAME_COMMAND)
    replicas, store = joining.join(store, timeout)
    mesh = build_mesh(device, world.world_size, config)
    for axis in mesh.mesh_dim_names:
        set_time_limit(mesh.get_group(axis), timeout)
    return Ranks(
        environment=world,
        device=device,
        mesh=mesh,
        store=store,
        replicas=replicas,
        context_size=config.context_parallel_size,
        ranks_per_node=ranks_per_node,
    )


def build_mesh(device: torch.device, num_ranks: int, config: ParallelConfig) -> DeviceMesh:
    """Return the mesh of all ranks: the data axis, and the others that have several ranks."""
    sizes = mesh_sizes(num_ranks, config)
    sizes = {name: size for name, size in sizes.items() if size > 1 or name == "data"}
    return init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def mesh_sizes(num_ranks: int, config: ParallelConfig) -> dict[str, int]:
    """Return the sizes of the axes of the mesh of all ranks, the slowest first."""
    pipe, tensor = config.pipeline_model_parallel_size, config.tensor_model_parallel_size
    return {"pipe": pipe, "data": num_ranks // (pipe * tensor), "tensor": tensor}
