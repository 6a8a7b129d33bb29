"""Parameters that are whole for a while, in the place of their shards, and passes that use them.

A `WholeParameter` is swapped with a parameter's shard, so that every reference sees it. FSDP2 would
still gather the shards: here the unit computes with the whole values instead, in its own format.
Nothing is sent for a unit all of whose parameters are whole, so that one rank may use it alone.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor, Replicate

from zeropp.errors import InputError
from zeropp.fsdp_adapter.parameters import Unit, groups_of, parameters_of


def gather_whole(tensor: DTensor) -> torch.Tensor:
    """Return the whole tensor; all ranks call it. For a tensor without elements, which DTensor
    cannot gather, return a new one."""
    if not tensor.numel():
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    for axis, placement in enumerate(tensor.placements):
        if type(placement) is not Replicate and axis + 1 < len(tensor.placements):
            # one axis after another, or PyTorch warns that it takes several collectives
            placements = [*tensor.placements]
            placements[axis] = Replicate()
            tensor = tensor.redistribute(placements=placements)
    return tensor.full_tensor()


class WholeParameter(torch.Tensor):
    """A plain tensor that can be swapped with a DTensor, because it has the same slots."""

    __slots__ = tuple(DTensor.__slots__)
    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def of(cls, parameter: DTensor) -> "WholeParameter":
        """Gather a parameter, in memory of its own; all ranks call it."""
        local = parameter._local_tensor
        with torch.no_grad():
            values = gather_whole(parameter.detach())
            if values.untyped_storage().data_ptr() == local.untyped_storage().data_ptr():
                values = values.clone()
        whole = torch.Tensor._make_subclass(cls, values, parameter.requires_grad)
        vars(whole).update(vars(parameter))
        whole._local_tensor, whole._spec = local, parameter._spec  # which FSDP2 looks for
        if isinstance(parameter, nn.Parameter):
            whole._is_param = True  # makes isinstance(whole, nn.Parameter) true
        return whole


def has_whole_parameters(unit: Unit) -> bool:
    """Whether some of the unit's parameters are whole in the place of their shards."""
    return any(isinstance(each.sharded_param, WholeParameter) for each in parameters_of(unit))


def keep_shard_of_whole(parameter: FSDPParam) -> None:
    """Let FSDP2 not look for a new shard when a state was loaded into a `WholeParameter`."""
    reset_sharded_param = parameter.reset_sharded_param

    def reset_unless_whole() -> None:
        info = parameter._module_info
        is_kept = getattr(parameter, "zeropp_values", None) is not None
        is_plain = is_kept and not isinstance(info.module._parameters[info.param_name], DTensor)
        if not is_plain and not isinstance(parameter.sharded_param, WholeParameter):
            reset_sharded_param()

    parameter.reset_sharded_param = reset_unless_whole


def use_whole_parameters(unit: FSDPModule) -> None:
    """Let passes of a unit use those of its parameters that are whole."""
    for group in groups_of(unit):
        group.unshard = partial(_unshard, group, group.unshard)


def _unshard(group: FSDPParamGroup, unshard: Callable, async_op: bool = False) -> None:
    whole = [each for each in group.fsdp_params if isinstance(each.sharded_param, WholeParameter)]
    if not whole:
        unshard(async_op)
        return
    if group._training_state == TrainingState.PRE_BACKWARD:
        raise InputError(
            "a backward pass inside GatheredParameters would lose its gradients: call backward() "
            "after the context"
        )
    if any(each._unsharded_dtensor_spec is not None for each in whole):
        raise InputError(
            "a forward pass inside GatheredParameters of parameters that are split over other "
            "axes than the data axis, too: run it after the context"
        )
    if len(whole) < len(group.fsdp_params) or any(map(_is_extended, whole)):
        unshard()
        group.wait_for_unshard()
    elif not group.is_unsharded:
        for parameter in whole:
            _allocate(parameter, group)
        group._to_unsharded()
    for parameter in whole:
        gathered = parameter._unsharded_param
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(gathered):
            gathered.copy_(parameter.sharded_param.as_subclass(torch.Tensor))


def _is_extended(parameter: FSDPParam) -> bool:
    return hasattr(parameter._sharded_local_tensor, "fsdp_post_all_gather")


def _allocate(parameter: FSDPParam, group: FSDPParamGroup) -> None:
    """Make room for the whole parameter as if it had been gathered."""
    has_shards = isinstance(group.mesh_info, FSDPMeshInfo)
    ranks = group._all_gather_process_group.size() if has_shards else 1
    size = parameter.padded_sharded_param_size.numel()
    dtype = parameter.param_dtype or parameter.orig_dtype
    parameter.init_all_gather_outputs([size], [dtype], ranks, parameter.device)
    parameter.alloc_all_gather_outputs()
    parameter.init_unsharded_param()
