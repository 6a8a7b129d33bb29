"""The only file that knows FSDP2's private names, for torch 2.11 to 2.13.

FSDP2 is the engine (docs/adr/0001): it gathers a unit's parameters before its forward and backward
and reduces their gradients afterwards. Everything of ours enters through its extension points.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Variable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor

__all__ = [
    "ON_DEVICE",
    "AllGather",
    "CPUOffloadPolicy",
    "FSDPModule",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "Piece",
    "ReduceScatter",
    "Shard",
    "after_backward",
    "backward_id",
    "before_use",
    "free_gathered",
    "gather_ahead",
    "gathered_names",
    "has_run",
    "in_backward",
    "is_on_host",
    "is_trainable",
    "may_reduce_later",
    "own_pieces",
    "own_shards",
    "refresh_parameters",
    "shard_like",
    "shard_unit",
    "show_gathered",
    "show_shards",
    "store",
    "take_gradients",
    "use_all_gather",
    "use_reduce_scatter",
    "watch_gradients",
]

ON_DEVICE = OffloadPolicy()  # shards stay on the device
# How many gathers are issued ahead of a unit's forward. With one, the links between nodes would be
# idle during its second hop. Each costs the memory of one more gathered unit.
AHEAD = 2


@dataclass(frozen=True, kw_only=True)
class Piece:
    """One parameter's part of its unit's buffers: `elements` of one rank's padded shard.

    packed_bytes: its size on the wire if it is stored quantized; 0 if it is stored as numbers.
    """

    elements: int
    ndim: int
    trainable: bool
    packed_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class Shard:
    """One parameter of a unit, and this rank's part of it."""

    piece: Piece
    local: torch.Tensor
    parameter: FSDPParam


def shard_unit(
    unit: nn.Module | list[nn.Module],
    mesh: DeviceMesh,
    precision: MixedPrecisionPolicy,
    *,
    reshard_after_forward: bool,
    place: OffloadPolicy = ON_DEVICE,
    ignored: Iterable[nn.Parameter] = (),
) -> None:
    """Make `unit` an FSDP unit in place: one gather before its forward, one reduction after.

    A list of modules becomes one unit, whose collectives are set on the first module. Parameters in
    `ignored` are left out.
    """
    fully_shard(
        unit,
        mesh=mesh,
        mp_policy=precision,
        offload_policy=place,
        reshard_after_forward=reshard_after_forward,
        ignored_params=set(ignored),
    )


def use_all_gather(unit: FSDPModule, comm: AllGather) -> None:
    """Use `comm` to gather the unit's weights."""
    unit.set_custom_all_gather(comm)


def use_reduce_scatter(unit: FSDPModule, comm: ReduceScatter) -> None:
    """Use `comm` to average the unit's gradients: it is called with the op SUM and divides."""
    unit.set_custom_reduce_scatter(comm)
    unit.set_force_sum_reduction_for_comms(True)
    unit.set_gradient_divide_factor(1.0)


def gather_ahead(root: FSDPModule, blocks: Sequence[FSDPModule]) -> None:
    """Issue each unit's gather while the `AHEAD` units before it compute.

    Without streams (on CPUs) gathers overlap only if they are asynchronous and prefetched.
    """
    root._set_unshard_async_op(True)
    units = (root, *blocks)
    for index, unit in enumerate(blocks):
        units[index].set_modules_to_forward_prefetch([unit, *blocks[index + 1 : index + AHEAD]])


def own_pieces(unit: FSDPModule) -> tuple[Piece, ...]:
    """Return the unit's own parameters, not those of units inside it, in buffer order."""
    return tuple(map(_piece, _parameters(unit)))


def own_shards(unit: FSDPModule) -> tuple[Shard, ...]:
    """Return the unit's own parameters in buffer order. Must not be called during a pass."""
    for group in _groups(unit):
        group.reshard()
    return tuple(
        Shard(
            piece=_piece(parameter),
            local=parameter.sharded_param._local_tensor,
            parameter=parameter,
        )
        for parameter in _parameters(unit)
    )


def refresh_parameters(units: Iterable[FSDPModule]) -> None:
    """Make FSDP2 use the parameters that the modules hold now."""
    for unit in units:
        for parameter in _parameters(unit):
            parameter.reset_sharded_param()


def store(shard: Shard, stored: torch.Tensor) -> None:
    """Replace this rank's part by `stored`, a tensor that has FSDP2's all-gather hooks.

    Previously gathered values are dropped. FSDP2 looks for the hooks only when it shards, so its
    extensions are initialized again. `stored.packed` is the storage that FSDP2 compares with its
    own.
    """
    parameter, old = shard.parameter, shard.parameter.sharded_param
    if old.is_meta:  # a tensor's device cannot be changed in place
        sharded = shard_like(old, stored)
        parameter.sharded_param = nn.Parameter(sharded, requires_grad=old.requires_grad)
        parameter._setattr_on_modules(parameter.sharded_param)
    else:
        old._local_tensor = stored
    parameter._sharded_param_data = stored.packed
    parameter._init_extensions()
    parameter.all_gather_outputs = []
    if hasattr(parameter, "_unsharded_param"):
        del parameter._unsharded_param


def in_backward(unit: FSDPModule) -> bool:
    """Whether FSDP2 is gathering this unit for a backward pass."""
    groups = _groups(unit)
    return bool(groups) and groups[0]._training_state == TrainingState.PRE_BACKWARD


def free_gathered(unit: FSDPModule) -> None:
    """Free the unit's full weights, and finish a prefetched gather that nobody waited for."""
    for group in _groups(unit):
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
        group.reshard()


def before_use(unit: FSDPModule, prepare: Callable[[], None]) -> None:
    """Call `prepare` each time FSDP2 is about to use the unit's weights, gathered or not."""

    def prepare_and_unshard(unshard: Callable, async_op: bool = False) -> None:
        prepare()
        unshard(async_op)

    for group in _groups(unit):
        group.unshard = partial(prepare_and_unshard, group.unshard)


def show_shards(unit: FSDPModule) -> None:
    """Let modules hold their shards between passes; weights that are gathered stay so."""
    for group in _groups(unit):
        if group.is_unsharded and group._training_state == TrainingState.IDLE:
            for parameter in group.fsdp_params:
                parameter._setattr_on_modules(parameter.sharded_param)


def show_gathered(unit: FSDPModule) -> None:
    """Undo `show_shards` for a pass; parameters frozen since then are frozen in it."""
    for group in _groups(unit):
        if group.is_unsharded and _shows_shards(group):
            for parameter in group.fsdp_params:
                parameter.to_unsharded()


def gathered_names(unit: FSDPModule) -> dict[nn.Parameter, str]:
    """Return the unit's gathered weights, which FSDP2 overwrites by gathers, and their names."""
    return {
        parameter._unsharded_param: str(parameter._param_fqn)
        for parameter in _parameters(unit)
        if hasattr(parameter, "_unsharded_param")
    }


def is_trainable(unit: FSDPModule) -> bool:
    """Whether any of the unit's own parameters requires gradients."""
    return any(parameter.sharded_param.requires_grad for parameter in _parameters(unit))


def may_reduce_later(unit: FSDPModule) -> bool:
    """Whether nothing reads the unit's reduced gradients before the backward pass ends.

    FSDP2 reads them immediately if it adds them to existing gradients, casts them to another dtype,
    or runs hooks on accumulated gradients.
    """
    shards = (parameter.sharded_param for parameter in _parameters(unit))
    return all(
        shard.grad is None
        and shard.dtype == torch.float32
        and not shard._post_accumulate_grad_hooks
        for shard in shards
        if shard.requires_grad
    )


def backward_id() -> int:
    """Return an id of the backward pass running on this thread; -1 if there is none."""
    return torch._C._current_graph_task_id()


def after_backward(callback: Callable[[], None]) -> None:
    """Call `callback` at the end of the running backward pass, before `backward()` returns."""
    Variable._execution_engine.queue_callback(callback)


def has_run(unit: FSDPModule) -> bool:
    """Whether the unit has been used, so that its parameters' dtypes are fixed."""
    return any(group._reset_sharded_params for group in _groups(unit))


def is_on_host(unit: FSDPModule) -> bool:
    """Whether FSDP2 keeps the unit's shards on the host and copies them for each gather."""
    return any(parameter.offload_to_cpu for parameter in _parameters(unit))


def shard_like(parameter: DTensor, local: torch.Tensor) -> DTensor:
    """Return a tensor sharded as `parameter` with this rank's part `local`, on any device."""
    return DTensor(local, parameter._spec, requires_grad=False)


def take_gradients(unit: FSDPModule, take: Callable[[nn.Parameter, torch.Tensor], None]) -> None:
    """Pass this rank's part of each averaged gradient, in fp32, to `take`; leave no `.grad`.

    `take` is called as each reduction is queued, on its stream. FSDP2 rounds the means to the
    parameters' dtype; the means from before rounding are passed on. Where it keeps the parameters
    on the host, it would also copy each rounded mean there, and wait for that because of our hooks.
    While it puts the means in their places, it is told that the parameters are on the device.
    """
    remaining: list[torch.Tensor] = []  # the part of the buffer of means not yet passed on
    on_host = [parameter for parameter in _parameters(unit) if parameter.offload_to_cpu]

    def keep_means(means: torch.Tensor) -> None:
        remaining[:] = [means]
        for parameter in on_host:
            parameter.offload_to_cpu = False

    def pass_on(parameter: nn.Parameter, padded: int) -> None:
        local, parameter.grad = parameter.grad._local_tensor, None
        means = remaining.pop()
        if padded < means.numel():  # an empty view would keep the buffer alive
            remaining.append(means[padded:])
        else:
            for each in on_host:
                each.offload_to_cpu = True
        take(parameter, means[: local.numel()].view(local.shape))

    unit.set_all_reduce_hook(keep_means)
    for parameter in on_host:  # a gradient must be where its parameter is, if only until `pass_on`
        parameter.to_sharded_dtensor = partial(_placeholder, parameter)
    for parameter in _parameters(unit):
        if parameter.sharded_param.requires_grad:
            hook = partial(pass_on, padded=parameter.padded_sharded_param_size.numel())
            parameter.sharded_param.register_post_accumulate_grad_hook(hook)


def watch_gradients(unit: FSDPModule) -> Callable[[], tuple[int, ...]]:
    """Return a function that lists which of `own_pieces` got gradients since its last call.

    FSDP2 leaves parameters without a gradient out of the buffer it reduces and does not say which.
    """
    with_gradient: set[int] = set()
    watched: set[int] = set()

    def watch(*_: object) -> None:
        for index, parameter in enumerate(_parameters(unit)):
            if index not in watched and parameter._unsharded_param.requires_grad:
                parameter._unsharded_param.register_post_accumulate_grad_hook(
                    lambda _, index=index: with_gradient.add(index)
                )
                watched.add(index)

    def indices_with_gradient() -> tuple[int, ...]:
        indices = tuple(sorted(with_gradient))
        with_gradient.clear()
        return indices

    for module in unit._get_fsdp_state()._modules:  # a pass may run only some of them
        module.register_forward_pre_hook(watch)  # after FSDP2's own hook, which gathers
    return indices_with_gradient


def _piece(parameter: FSDPParam) -> Piece:
    is_packed = hasattr(parameter.sharded_param._local_tensor, "fsdp_pre_all_gather")
    return Piece(
        elements=parameter.padded_sharded_param_size.numel(),
        ndim=len(parameter._orig_size),
        trainable=parameter.sharded_param.requires_grad,
        packed_bytes=parameter._sharded_param_data.nbytes if is_packed else 0,
    )


def _placeholder(parameter: FSDPParam, gradient: torch.Tensor) -> DTensor:
    return parameter.sharded_param.detach()


def _shows_shards(group: FSDPParamGroup) -> bool:
    first = group.fsdp_params[0]
    held = getattr(first._module_info.module, first._module_info.param_name)
    return held is first.sharded_param


def _parameters(unit: FSDPModule) -> list[FSDPParam]:
    return [parameter for group in _groups(unit) for parameter in group.fsdp_params]


def _groups(unit: FSDPModule) -> list:
    state = unit._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return state._fsdp_param_groups
    return [state._fsdp_param_group] if state._fsdp_param_group else []  # torch 2.11
