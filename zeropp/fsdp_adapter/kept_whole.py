"""Weights that stay gathered, and in their modules, between passes: plain tensors for programs.

They are the tensors that FSDP2 gathers into, the same objects after each gather. Where FSDP2 frees
their memory, it is given up here instead: what a program still has of it, such as a NumPy array,
keeps its values. The parameters are NaN until the next gather, in no memory.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

from zeropp.fsdp_adapter.gathered import is_gathered, show_gathered
from zeropp.fsdp_adapter.param_groups import groups_of, parameters_of, state_of


@dataclass(frozen=True, kw_only=True)
class OwnRows:
    """This rank's rows of a gathered parameter: `gathered`, and `local` in its `shard`.

    padded: the elements of `local`, 1-d, with the padding that is sent.
    """

    shard: nn.Parameter
    local: torch.Tensor
    padded: torch.Tensor
    gathered: torch.Tensor


def keep_whole(unit: FSDPModule) -> bool:
    """Let only passes and `free_gathered` free the unit's weights; say whether that is possible.

    It is not where parameters are split over other axes: no rank then gathers all of them.
    """
    if any(map(_is_partly_gathered, parameters_of(unit))):
        return False
    for group in groups_of(unit):
        group._to_sharded = partial(_to_sharded, group, group._to_sharded)
        group.zeropp_frees = group.zeropp_shows_shards = False
        for each in group.fsdp_params:
            each.zeropp_values = None
            each.free_unsharded_param = partial(_free, each)
            each.init_unsharded_param = partial(_restore, each, each.init_unsharded_param)
    return True


def generate_alone(model: nn.Module) -> None:
    """Let transformers' `generate` run on one rank: for what FSDP2 shards, ranks would meet."""
    for module in model.modules():
        if hasattr(module, "generate"):
            vars(module).pop("_is_fsdp_managed_module", None)


def gather_and_show(root: FSDPModule, unit: FSDPModule) -> None:
    """Gather a unit of the root between passes, unless it is gathered; let its modules show it."""
    if not is_gathered(unit):
        state_of(root)._lazy_init()  # or the unit would take itself for a root
        unit.unshard()
    show_gathered(unit)


def adopt_whole(unit: FSDPModule) -> None:
    """Let shards have the attributes that the whole parameters in their place have got.

    Values that were put in their place are copied into the memory that FSDP2 gathers into.
    """
    for group in groups_of(unit):
        if group.is_unsharded and group._training_state == TrainingState.IDLE:
            for parameter in group.fsdp_params:
                _adopt(parameter)


def own_rows(unit: FSDPModule) -> Iterator[OwnRows]:
    """Yield this rank's rows of a gathered unit, in the order of `own_specs`."""
    for each in parameters_of(unit):
        shard = each.sharded_param
        if not each.zeropp_values.is_floating_point():
            continue
        dim, local = each.fsdp_placement.dim, shard._local_tensor
        has_shards = isinstance(each.mesh_info, FSDPMeshInfo)
        place = each.mesh_info.shard_mesh_rank if has_shards else 0
        begin = min(place * each.padded_sharded_param_size[dim], each._orig_size[dim])
        length = local.size(dim) if local.numel() else 0
        yield OwnRows(
            shard=shard,
            local=local,
            padded=each._sharded_param_data,
            gathered=each.zeropp_values.narrow(dim, begin, length).view(local.shape),
        )


def whole_of(unit: FSDPModule, shard: nn.Parameter) -> nn.Parameter | None:
    """Return the whole parameter of a shard of the unit that modules hold now, if they do."""
    for each in parameters_of(unit):
        if each.sharded_param is shard and is_gathered(unit):
            return each._unsharded_param
    return None


def _to_sharded(group: object, to_sharded: partial) -> None:
    """Free what a pass frees, and what is to be freed, but not for a state dict or a conversion."""
    if group.zeropp_frees or group._training_state != TrainingState.IDLE:
        to_sharded()


def _free(parameter: FSDPParam) -> None:
    values = parameter.zeropp_values
    parameter.all_gather_outputs, parameter.zeropp_values = [], None
    if values is not None:
        value = float("nan") if values.is_floating_point() else 0
        nothing = torch.full((), value, dtype=values.dtype, device=values.device)
        parameter._unsharded_param.data = nothing.expand(values.shape)


def _restore(parameter: FSDPParam, init: partial) -> None:
    init()
    size, stride = parameter._orig_size, parameter._contiguous_orig_stride
    parameter.zeropp_values = torch.as_strided(parameter.all_gather_outputs[0], size, stride, 0)
    parameter._unsharded_param.data = parameter.zeropp_values


def _adopt(parameter: FSDPParam) -> None:
    shard, whole, values = (
        parameter.sharded_param, parameter._unsharded_param, parameter.zeropp_values
    )  # fmt: skip
    info = parameter._module_info
    held = getattr(info.module, info.param_name)
    if held is shard:
        return
    if held is not whole and held.shape == whole.shape:  # as by load_state_dict(assign=True)
        whole.data = held.detach().to(values.device)
        whole.requires_grad_(held.requires_grad)
    if whole.data_ptr() != values.data_ptr() or whole.dtype != values.dtype:
        values.copy_(whole.detach())
        whole.data = values
    if shard.requires_grad != whole.requires_grad:
        shard.requires_grad_(whole.requires_grad)
    vars(shard).update(vars(whole))


def _is_partly_gathered(parameter: FSDPParam) -> bool:
    """Whether ranks gather parts on other axes, or what hooks of the parameter gather."""
    is_split = parameter._unsharded_dtensor_spec is not None
    return is_split or hasattr(parameter._sharded_local_tensor, "fsdp_post_all_gather")
