"""A unit's gathered weights: when they are used, shown by modules, kept whole there, and freed.

What modules hold between passes are shards, or, where weights are kept whole, plain tensors for
programs: those that FSDP2 gathers into, the same objects after each gather. Where FSDP2 frees
their memory, it is given up here instead: what a program still has of it, such as a NumPy array,
keeps its values. The parameters are NaN until the next gather, in no memory.

A `WholeParameter` is whole for a while in the place of a shard. It is swapped with it, so that
every reference sees it. FSDP2 would still gather the shards: here the unit computes with the whole
values instead, in its own format. Nothing is sent for a unit all of whose parameters are whole, so
that one rank may use it alone.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor, Replicate

from zeropp.errors import InputError
from zeropp.fsdp_adapter.parameters import Unit, groups_of, parameters_of, state_of
from zeropp.fsdp_adapter.passes import backward_id


@dataclass(frozen=True, kw_only=True)
class OwnRows:
    """This rank's rows of a gathered parameter: `gathered`, and `local` in its `shard`.

    padded: the elements of `local`, 1-d, with the padding that is sent.
    """

    shard: nn.Parameter
    local: torch.Tensor
    padded: torch.Tensor
    gathered: torch.Tensor


def in_backward(unit: Unit) -> bool:
    """Whether FSDP2 is gathering this unit for a backward pass, or for what it recomputes."""
    groups = groups_of(unit)
    is_next = bool(groups) and groups[0]._training_state == TrainingState.PRE_BACKWARD
    return is_next or backward_id() != -1


def is_gathered(unit: Unit) -> bool:
    """Whether the unit's weights are gathered, or on their way, and will be used as they are."""
    return any(
        group.is_unsharded or group._all_gather_result is not None for group in groups_of(unit)
    )


def free_gathered(unit: Unit) -> None:
    """Free the unit's full weights, and finish a prefetched gather that nobody waited for."""
    for group in groups_of(unit):
        if group._training_state != TrainingState.IDLE:
            continue  # in use
        if (prefetched := group._all_gather_result) is not None:
            if prefetched.all_gather_event is not None:
                # Its memory goes back to the copy-in stream, or to the current one after `unshard`.
                group._wait_all_gather_streams_on_event(prefetched.all_gather_event)
                group.device_handle.current_stream().wait_event(prefetched.all_gather_event)
            if isinstance(prefetched.all_gather_work, dist.Work):
                prefetched.all_gather_work.wait()
            group._all_gather_result = None
        group.zeropp_frees = True  # although weights are kept between passes
        group.reshard()
        group.zeropp_frees = False


def before_use(unit: Unit, prepare: Callable[[], None]) -> Callable[[], None]:
    """Call `prepare` each time FSDP2 is about to use the unit's weights, gathered or not.

    A prefetch by a unit that runs alone before any root did is left out: FSDP2 cannot gather units
    that it has not initialized. Returns what undoes this.
    """
    groups = groups_of(unit)
    previous = [vars(group).get("unshard") for group in groups]

    def prepare_and_unshard(
        group: FSDPParamGroup, unshard: Callable, async_op: bool = False
    ) -> None:
        if group._reset_sharded_params:  # is initialized
            prepare()
            unshard(async_op)

    def undo() -> None:
        for group, unshard in zip(groups, previous, strict=True):
            del group.unshard
            if unshard is not None:
                group.unshard = unshard

    for group in groups:
        group.unshard = partial(prepare_and_unshard, group, group.unshard)
    return undo


def show_between_passes(unit: FSDPModule) -> None:
    """Let modules hold their shards also after backward passes, and gathered weights when used."""
    for group in groups_of(unit):
        group.zeropp_shows_shards = True
    before_use(unit, partial(show_gathered, unit))


def show_shards(unit: FSDPModule) -> None:
    """Let modules hold their shards between passes; weights that are gathered stay so."""
    for parameter in _gathered_between_passes(unit):
        parameter._setattr_on_modules(parameter.sharded_param)


def show_gathered(unit: FSDPModule) -> None:
    """Undo `show_shards` for a pass; parameters frozen since then are frozen in it."""
    for group in groups_of(unit):
        if group.is_unsharded and _shows_shards(group):
            for parameter in group.fsdp_params:
                parameter.to_unsharded()


def gathered_names(unit: FSDPModule) -> dict[nn.Parameter, str]:
    """Return the unit's gathered weights, which FSDP2 overwrites by gathers, and their names."""
    return {
        parameter._unsharded_param: str(parameter._param_fqn)
        for parameter in parameters_of(unit)
        if hasattr(parameter, "_unsharded_param")
    }


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
    for parameter in _gathered_between_passes(unit):
        _adopt(parameter)


def own_rows(unit: FSDPModule) -> Iterator[OwnRows]:
    """Yield this rank's rows of a gathered unit, in the order of `own_specs`."""
    for each in parameters_of(unit):
        shard = each.sharded_param
        if not each.zeropp_values.is_floating_point():
            continue
        dim, local = each.fsdp_placement.dim, shard._local_tensor
        place = each.mesh_info.shard_mesh_rank
        begin = min(place * each.padded_sharded_param_size[dim], each._orig_size[dim])
        length = local.size(dim) if local.numel() else 0
        yield OwnRows(
            shard=shard,
            local=local,
            padded=each._sharded_param_data,
            gathered=each.zeropp_values.narrow(dim, begin, length).view(local.shape),
        )


def whole_of(unit: FSDPModule, shard: nn.Parameter) -> nn.Parameter | None:
    """Return the whole parameter of a shard of the unit, if it is kept whole and gathered now."""
    for each in parameters_of(unit):
        if each.sharded_param is shard and getattr(each, "zeropp_values", None) is not None:
            return each._unsharded_param
    return None


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
    """Let passes of a unit use those of its parameters that are whole.

    Where one rank has all shards, it copies them to be used, in one operation.
    """
    for group in groups_of(unit):
        group.unshard = partial(_unshard, group, group.unshard)
        if group.mesh_info.shard_mesh_size == 1:
            group.wait_for_unshard = partial(_copy_shards, group, group.wait_for_unshard)


def _gathered_between_passes(unit: FSDPModule) -> Iterator[FSDPParam]:
    for group in groups_of(unit):
        if group.is_unsharded and group._training_state == TrainingState.IDLE:
            yield from group.fsdp_params


def _shows_shards(group: FSDPParamGroup) -> bool:
    first = group.fsdp_params[0]
    held = getattr(first._module_info.module, first._module_info.param_name)
    return held is not first._unsharded_param  # but the shard, or a stand-in for it


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
    return parameter._unsharded_dtensor_spec is not None or _is_extended(parameter)


def _is_extended(parameter: FSDPParam) -> bool:
    return hasattr(parameter._sharded_local_tensor, "fsdp_post_all_gather")


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


def _copy_shards(group: FSDPParamGroup, wait: Callable[[], None]) -> None:
    parameters = group.fsdp_params
    is_here = all(each._sharded_param_data.device == each.device for each in parameters)
    if group._all_gather_result is None or not is_here or any(map(_is_extended, parameters)):
        wait()
        return
    with torch.no_grad(), torch._C._DisableFuncTorch():
        for each in parameters:
            _allocate(each, group)
        outputs = [each.all_gather_outputs[0] for each in parameters]
        counted = tuple(each for each in outputs if not each.is_inference())
        with torch.autograd._unsafe_preserve_version_counter(counted):
            torch._foreach_copy_(outputs, [each._sharded_param_data for each in parameters])
        group._to_unsharded()
    group._all_gather_result = None


def _allocate(parameter: FSDPParam, group: FSDPParamGroup) -> None:
    """Make room for the whole parameter as if it had been gathered."""
    size, ranks = parameter.padded_sharded_param_size.numel(), group.mesh_info.shard_mesh_size
    dtype = parameter.param_dtype or parameter.orig_dtype
    parameter.init_all_gather_outputs([size], [dtype], ranks, parameter.device)
    parameter.alloc_all_gather_outputs()
    parameter.init_unsharded_param()
