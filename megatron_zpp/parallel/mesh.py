"""The mesh of ranks: the axis `data`, `pipe` where layers and `tensor` where matrices are split.

    rank = ((p * R + replica) * C + c) * T + t        Megatron's order: tensor ranks fastest

R replicas see different samples. C context ranks that share each sequence are a run of the data
axis, as weights and gradients go over both alike. p is the place in a pipeline. Ranks of a node are
consecutive. The mesh is built once and passed as a value. `zeropp.ranks.process_group` chooses the
device.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property, partial
from types import MappingProxyType
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from megatron_zpp.parallel.axes import ContextAxis, TensorAxis
from megatron_zpp.parallel.main_thread import MainThread
from megatron_zpp.parallel.peers import AXES, Peers
from megatron_zpp.settings.config import ParallelConfig
from zeropp.ranks.coordination import fail_together, require_same
from zeropp.ranks.groups import set_time_limit, shared_group
from zeropp.ranks.process_group import pick_device, start_process_group
from zeropp.ranks.topology import Environment
from zeropp.wire.route import Hop, Nodes
from zeropp.wire.traffic import Traffic

SAME_COMMAND = (
    "Start all ranks with the same command line, the same JSON and the same versions; only paths "
    "may differ between machines"
)

Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """This process among the ranks of a run: its environment, device, mesh, and shared store.

    `main_thread` is marked where all ranks go on, so that others notice when this one does not.
    """

    environment: Environment
    device: torch.device
    mesh: DeviceMesh
    store: dist.Store
    context_size: int = 1  # consecutive ranks of the data axis that share each sequence
    ranks_per_node: int | None = None  # as launched if None
    activations: Traffic = field(default_factory=partial(Traffic, AXES))  # what this rank has sent
    main_thread: MainThread = field(default_factory=MainThread)

    @property
    def rank(self) -> int:
        return self.environment.rank

    @property
    def num_ranks(self) -> int:
        return self.environment.world_size

    @cached_property
    def data(self) -> DeviceMesh:
        """The ranks that hold the same parts of the model's matrices, and see different samples."""
        return self.mesh["data"] if self.mesh.ndim > 1 else self.mesh

    @property
    def tensor_size(self) -> int:
        """How many ranks share each matrix."""
        return self._size("tensor")

    @property
    def tensor_place(self) -> int:
        """Which part of each matrix this rank has."""
        return self.mesh.get_local_rank("tensor") if self.tensor_size > 1 else 0

    @property
    def pipeline_size(self) -> int:
        """How many ranks share the layers."""
        return self._size("pipe")

    @property
    def pipeline(self) -> tuple[int, ...]:
        """The ranks that share the layers with this one, by their places."""
        if self.pipeline_size == 1:
            return (self.rank,)
        return tuple(dist.get_process_group_ranks(self.mesh.get_group("pipe")))

    @property
    def pipeline_place(self) -> int:
        """The place of this rank in its pipeline."""
        return self.pipeline.index(self.rank)

    @property
    def nodes(self) -> Nodes:
        """The nodes of all ranks, wherever they are in the mesh."""
        per_node = self.ranks_per_node or self.environment.local_world_size
        return Nodes(num_ranks=self.num_ranks, ranks_per_node=per_node)

    @property
    def tensor_peers(self) -> Peers:
        """The ranks that share each matrix with this one."""
        return self.peers("tensor", self.mesh.get_group("tensor"))

    @property
    def context_peers(self) -> Peers:
        """The ranks that share each sequence with this one."""
        data = self.data.mesh.tolist()
        first = self.replica * self.context_size
        group = shared_group("context", data[first : first + self.context_size], data)
        return self.peers("context", group)

    def tensor_axis(self, config: ParallelConfig) -> TensorAxis | None:
        """Return the axis over which layers are split, if they are."""
        if self.tensor_size == 1:
            return None
        return TensorAxis(
            peers=self.tensor_peers, sequence_parallel=config.sequence_parallel,
            mesh=self.mesh["tensor"],
        )  # fmt: skip

    def context_axis(self, config: ParallelConfig) -> ContextAxis | None:
        """Return the axis over which sequences are split, if they are."""
        if self.context_size == 1:
            return None
        gathers_keys = config.cp_comm_type == "allgather"
        return ContextAxis(peers=self.context_peers, gathers_keys=gathers_keys)

    def peers(self, purpose: str, group: dist.ProcessGroup) -> Peers:
        """Return the ranks of a group of this one's as peers for one of `AXES`."""
        hop = Hop(members=tuple(dist.get_process_group_ranks(group)), nodes=self.nodes)
        return Peers(
            purpose=purpose, rank=self.rank, group=group, hop=hop, traffic=self.activations
        )

    def sharing(self) -> dict[str, tuple[int, ...]]:
        """Return the ranks that share something with this one, by what they share."""
        axes = {}
        if self.tensor_size > 1:
            axes["each matrix"] = self.tensor_peers.hop.members
        if self.context_size > 1:
            axes["each sequence"] = self.context_peers.hop.members
        if self.pipeline_size > 1:
            axes["the layers"] = self.pipeline
        return axes

    @property
    def ends_of_pipeline(self) -> Peers:
        """The first and the last rank of the pipeline, of which this is one."""
        first, *_, last = self.pipeline
        group = shared_group("ends", sorted((first, last)), self.pipeline)
        return self.peers("pipeline", group)

    @property
    def num_losses(self) -> int:
        """How many ranks compute a loss: those at the end of a pipeline."""
        return self.num_ranks // self.pipeline_size

    @property
    def num_replicas(self) -> int:
        """How many ranks, or groups of ranks that share their work, see different samples."""
        return self.data.size() // self.context_size

    @property
    def replica(self) -> int:
        """The number of this rank's replica."""
        return self.data.get_local_rank() // self.context_size

    @property
    def context_place(self) -> int:
        """Which part of its sequences this rank has."""
        return self.data.get_local_rank() % self.context_size

    @property
    def asynchronous(self) -> bool:
        """Whether the device computes while the host continues."""
        return self.device.type != "cpu"

    def sum(self, *values: float) -> list[float]:
        """Return each value summed over all ranks in fp64, with one collective of CPU tensors."""
        return self.sum_tensor(torch.tensor(values, dtype=torch.float64)).tolist()

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
) -> Ranks:
    """Start the process group and build the mesh of all ranks that the configuration names.

    Raises InputError on all ranks if they do not have the same `settings`, texts by their names.
    """
    device = pick_device(environment)
    timeout = timedelta(minutes=config.distributed_timeout_minutes)
    store = start_process_group(environment, device, timeout, config.distributed_backend)
    require_same(settings, SAME_COMMAND)
    mesh = build_mesh(device, environment.world_size, config)
    for axis in mesh.mesh_dim_names:
        set_time_limit(mesh.get_group(axis), timeout)
    return Ranks(
        environment=environment,
        device=device,
        mesh=mesh,
        store=store,
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
