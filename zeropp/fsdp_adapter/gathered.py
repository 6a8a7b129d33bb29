"""A unit's gathered weights: when they are used, shown by modules, and freed."""

from collections.abc import Callable
from functools import partial

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from zeropp.fsdp_adapter.param_groups import Unit, groups_of, parameters_of
from zeropp.fsdp_adapter.passes import backward_id


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
    for group in groups_of(unit):
        if group.is_unsharded and group._training_state == TrainingState.IDLE:
            for parameter in group.fsdp_params:
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


def _shows_shards(group: FSDPParamGroup) -> bool:
    first = group.fsdp_params[0]
    held = getattr(first._module_info.module, first._module_info.param_name)
    return held is not first._unsharded_param  # but the shard, or a stand-in for it
