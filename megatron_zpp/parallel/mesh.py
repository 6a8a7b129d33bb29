"""The grid of ranks: one axis today, `data`, whose ranks are node-contiguous.

Made once and passed as a value. The device comes from `zeropp.ranks.process_group`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from megatron_zpp.settings.config import ParallelConfig
from zeropp.ranks.coordination import fail_together
from zeropp.ranks.process_group import pick_device, start_process_group
from zeropp.ranks.topology import Environment

Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """This process among the others: its place, device, mesh, and the store they met at."""

    environment: Environment
    device: torch.device
    mesh: DeviceMesh
    store: dist.Store

    @property
    def rank(self) -> int:
        return self.environment.rank

    @property
    def num_ranks(self) -> int:
        return self.environment.world_size

    @property
    def asynchronous(self) -> bool:
        """Whether the device computes what was asked of it while the host goes on."""
        return self.device.type != "cpu"

    def sum(self, *values: float) -> list[float]:
        """Each value summed over all ranks, in fp64; one collective, of the hosts."""
        return self.summed(torch.tensor(values, dtype=torch.float64)).tolist()

    def summed(self, values: torch.Tensor) -> torch.Tensor:
        """A tensor, of this rank's device or of its host, summed over all ranks in fp64."""
        total = values.to(torch.float64, copy=True)
        if self.num_ranks > 1:
            dist.all_reduce(total)
        return total

    def rank_zero_first(self, build: Callable[[], Result]) -> Result:
        """Call `build` on rank 0, then on the others, which find what rank 0 left in a cache.

        What it raises on one rank, it raises on all.
        """
        result = None
        with fail_together():
            if self.rank == 0:
                result = build()
        with fail_together():
            return build() if result is None else result


def join_ranks(environment: Environment, config: ParallelConfig) -> Ranks:
    """Start the process group and lay all ranks on the `data` axis."""
    device = pick_device(environment)
    timeout = timedelta(minutes=config.distributed_timeout_minutes)
    store = start_process_group(environment, device, timeout, config.distributed_backend)
    mesh = init_device_mesh(device.type, (environment.world_size,), mesh_dim_names=("data",))
    return Ranks(environment=environment, device=device, mesh=mesh, store=store)
