"""The mesh of ranks: one axis, `data`, on which the ranks of a node are consecutive.

It is built once and passed as a value. `zeropp.ranks.process_group` chooses the device.
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
    main_thread: MainThread = field(default_factory=MainThread)

    @property
    def rank(self) -> int:
        return self.environment.rank

    @property
    def num_ranks(self) -> int:
        return self.environment.world_size

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
    """Start the process group and build a mesh of all ranks, with the axis `data`."""
    device = pick_device(environment)
    timeout = timedelta(minutes=config.distributed_timeout_minutes)
    store = start_process_group(environment, device, timeout, config.distributed_backend)
    mesh = init_device_mesh(device.type, (environment.world_size,), mesh_dim_names=("data",))
    set_time_limit(mesh.get_group(), timeout)
    return Ranks(environment=environment, device=device, mesh=mesh, store=store)
