"""The only file that knows FSDP2's private names, for torch 2.11 to 2.13.

FSDP2 is the engine (docs/adr/0001): it gathers a unit's parameters before its forward and
backward and reduces their gradients after. Everything of ours enters by its extension points.
"""

from collections.abc import Sequence

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

__all__ = [
    "AllGather", "FSDPModule", "MixedPrecisionPolicy", "ReduceScatter",
    "gather_ahead", "shard_unit", "use_reduce_scatter",
]


def shard_unit(
    unit: nn.Module, mesh: DeviceMesh, policy: MixedPrecisionPolicy, *, reshard_after_forward: bool
) -> None:
    """Make `unit` an FSDP unit in place: one gather before its forward, one reduction after."""
    fully_shard(unit, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard_after_forward)


def use_reduce_scatter(units: Sequence[FSDPModule], comm: ReduceScatter) -> None:
    """Let `comm` average the gradients of every unit; it is called with the op SUM only."""
    for unit in units:
        unit.set_custom_reduce_scatter(comm)
        unit.set_force_sum_reduction_for_comms(True)


def gather_ahead(root: FSDPModule, blocks: Sequence[FSDPModule]) -> None:
    """Start each unit's gather while the unit before it computes.

    Without streams (CPU) nothing overlaps unless the gathers are asynchronous and prefetched.
    """
    root._set_unshard_async_op(True)
    for before, after in zip((root, *blocks[:-1]), blocks, strict=True):
        before.set_modules_to_forward_prefetch([after])
