"""Units that others have sharded: what they are."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

from zeropp.fsdp_adapter.parameters import (
    ParamGroup,
    Unit,
    groups_of,
    module_of,
    parameters_of,
    state_of,
)


def named_units(model: nn.Module) -> dict[str, Unit]:
    """Return the units that have parameters by the name of their first module, outer ones first.

    Of a unit whose parameters are on several meshes, each parameter group is one here.
    """
    states: dict[object, tuple[str, FSDPModule]] = {}
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule) and groups_of(module):
            states.setdefault(state_of(module), (name, module))
    units: dict[str, Unit] = {}
    for name, module in states.values():
        count = len(groups_of(module))
        if count == 1:
            units[name] = module
            continue
        for index in range(count):
            where = f"{name}, " if name else ""
            units[f"{where}parameter group {index}"] = ParamGroup(module, index)
    return units


def shard_group(unit: Unit) -> dist.ProcessGroup | None:
    """Return the ranks that a unit is sharded over; None if it is only replicated."""
    mesh = groups_of(unit)[0].mesh_info
    return mesh.shard_process_group if isinstance(mesh, FSDPMeshInfo) else None


def frees_after_forward(unit: Unit, model: nn.Module) -> bool:
    """Whether a unit's weights are gathered for forward and once more for backward.

    If that was left to FSDP2, it decides in the first pass: the root stays gathered. Until then the
    unit that has all others of the model is taken to be the root.
    """
    state = state_of(unit)
    is_root = state._is_root
    if is_root is None:
        units = [each for each in model.modules() if isinstance(each, FSDPModule)]
        is_root = module_of(unit) is units[0] and {*units} <= {*units[0].modules()}
    stays = is_root and state._auto_reshard_after_forward
    return groups_of(unit)[0].post_forward_mesh_info is not None and not stays


def keeps_part_after_forward(unit: Unit) -> bool:
    """Whether fewer ranks gather a unit for backward, as with an int `reshard_after_forward`."""
    group = groups_of(unit)[0]
    return group.post_forward_mesh_info not in (None, group.mesh_info)


def dtypes_of(unit: Unit) -> tuple[torch.dtype, torch.dtype]:
    """Return the dtypes in which weights are gathered and trained weights' gradients reduced."""
    policy = groups_of(unit)[0].mp_policy
    weights = [each.sharded_param for each in parameters_of(unit)]
    trained = next((each for each in weights if each.requires_grad), weights[0])
    reduced = policy.reduce_dtype or policy.param_dtype or trained.dtype
    return policy.param_dtype or weights[0].dtype, reduced


def gathered_dtypes(unit: Unit) -> set[torch.dtype]:
    """Return the dtypes in which weights are gathered, without those that have their own hooks."""
    cast = groups_of(unit)[0].mp_policy.param_dtype
    plain = [each for each in parameters_of(unit) if not _has_gather_hooks(each)]
    return {cast or parameter.sharded_param.dtype for parameter in plain}


def mixed_bytes(unit: Unit) -> int | None:
    """Return the bytes of a shard of several dtypes, which FSDP2 gathers as bytes; else None."""
    sizes = (
        each.padded_sharded_param_size.numel() * each.sharded_param.dtype.itemsize
        for each in parameters_of(unit)
    )
    return sum(sizes) if len(gathered_dtypes(unit)) > 1 else None


def has_gather_hooks(unit: Unit) -> bool:
    """Whether parameters of a unit have all-gather hooks."""
    return any(map(_has_gather_hooks, parameters_of(unit)))


def prefetches(unit: Unit) -> bool:
    """Whether it was set which units are gathered during this one's passes."""
    state = state_of(unit)
    return bool(state._states_to_forward_prefetch or state._states_to_backward_prefetch)


def _has_gather_hooks(parameter: FSDPParam) -> bool:
    return hasattr(parameter.sharded_param._local_tensor, "fsdp_pre_all_gather")
