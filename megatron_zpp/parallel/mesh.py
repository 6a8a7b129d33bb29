"""The mesh of ranks: the axis `data`, and the axis `tensor` where each matrix is split.

    rank = (replica * C + c) * T + t        Megatron's order: tensor ranks fastest, then context

C context ranks that share each sequence are a run of the data axis, as weights and gradients go
over both alike. Ranks of a node are consecutive. The mesh is built once and passed as a value.
`zeropp.ranks.process_group` chooses the device.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from megatron_zpp.parallel.main_thread import MainThread
from megatron_zpp.settings.config import ParallelConfig
from zeropp.ranks.coordination import fail_together
from zeropp.ranks.groups import set_time_limit
from zeropp.ranks.process_group import pick_device, start_process_group
from zeropp.ranks.topology import Environment

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
    main_thread: MainThread = field(default_factory=MainThread)

    @property
    def rank(self) -> int:
        return self.environment.rank

    @property
    def num_ranks(self) -> int:
        return self.environment.world_size

    @property
    def data(self) -> DeviceMesh:
        """The ranks that hold the same parts of the model's matrices, and see different samples."""
        return self.mesh["data"] if self.mesh.ndim > 1 else self.mesh

    @property
    def tensor_size(self) -> int:
        """How many ranks share each matrix."""
        return self.mesh.size(1) if self.mesh.ndim > 1 else 1

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


def join_ranks(environment: Environment, config: ParallelConfig) -> Ranks:
    """Start the process group and build the mesh of all ranks that the configuration names."""
    device = pick_device(environment)
    timeout = timedelta(minutes=config.distributed_timeout_minutes)
    store = start_process_group(environment, device, timeout, config.distributed_backend)
    mesh = build_mesh(device, environment.world_size, config)
    for axis in mesh.mesh_dim_names:
        set_time_limit(mesh.get_group(axis), timeout)
    size = config.context_parallel_size
    return Ranks(environment=environment, device=device, mesh=mesh, store=store, context_size=size)


def build_mesh(device: torch.device, num_ranks: int, config: ParallelConfig) -> DeviceMesh:
    """Return the mesh of all ranks; without tensor parallelism it has one axis."""
    tensor = config.tensor_model_parallel_size
    if tensor == 1:
        return init_device_mesh(device.type, (num_ranks,), mesh_dim_names=("data",))
    shape = (num_ranks // tensor, tensor)
    return init_device_mesh(device.type, shape, mesh_dim_names=("data", "tensor"))
