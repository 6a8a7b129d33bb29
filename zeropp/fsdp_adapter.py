"""The only file, with `fsdp_parameters`, that knows FSDP2's private names; torch 2.11 to 2.13.

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

from zeropp import fsdp_parameters
from zeropp.errors import InputError
from zeropp.fsdp_parameters import inherit, inherit_when_gathered

__all__ = [
    "ON_DEVICE",
    "abandon_pass",
    "accumulates",
    "awaits_end_of_backward",
    "is_in_pass",
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
    "before_reduction",
    "before_use",
    "discard_gradients",
    "free_gathered",
    "gather_ahead",
    "gathered_names",
    "has_run",
    "in_backward",
    "is_on_host",
    "is_trainable",
    "name_of",
    "own_pieces",
    "own_shards",
    "refresh_parameters",
    "set_gradient_dtypes",
    "shard_like",
    "shard_unit",
    "shards",
    "show_gathered",
    "show_shards",
    "store",
    "take_gradients",
    "use_all_gather",
    "use_reduce_scatter",
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
    `ignored` are left out. Attributes and gradient hooks of the parameters are kept.
    """
    modules = unit if isinstance(unit, list) else [unit]
    owners = {owner for module in modules for owner in module.modules()}
    originals = {owner: dict(owner.named_parameters(recurse=False)) for owner in owners}
    fully_shard(
        unit,
        mesh=mesh,
        mp_policy=precision,
        offload_policy=place,
        reshard_after_forward=reshard_after_forward,
        ignored_params=set(ignored),
    )
    for parameter in _parameters(modules[0]):
        info = parameter._module_info
        inherit(parameter.sharded_param, originals[info.module][info.param_name])
        inherit_when_gathered(parameter)


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
        inherit(parameter.sharded_param, old)
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


def backward_id() -> int:
    """Return an id of the backward pass running on this thread; -1 if there is none."""
    return torch._C._current_graph_task_id()


def after_backward(callback: Callable[[], None]) -> None:
    """Call `callback` at the end of the running backward pass, before `backward()` returns."""
    Variable._execution_engine.queue_callback(callback)


def is_in_pass(root: FSDPModule) -> bool:
    """Whether FSDP2 waits for the end of a pass of this root module."""
    context = root._get_fsdp_state()._state_ctx
    return context.iter_forward_root is not None or awaits_end_of_backward(root)


def awaits_end_of_backward(root: FSDPModule) -> bool:
    """Whether a backward pass of this root module has begun and not ended."""
    return root._get_fsdp_state()._state_ctx.post_backward_final_callback_queued


def abandon_pass(root: FSDPModule) -> None:
    """Let FSDP2 forget a pass that failed; gradients stay as they are.

    Raises InputError where FSDP2 cannot, before torch 2.13.
    """
    if not hasattr(root, "reset_iter_state"):
        raise InputError(
            f"the last pass ended with an exception, and torch {torch.__version__} cannot begin "
            "another one then: load a checkpoint in a new process, or use torch 2.13"
        )
    for state in root._get_fsdp_state()._state_ctx.all_states:
        for group in _groups_of(state):
            if reducer := getattr(group, "zeropp_reducer", None):
                reducer.is_due = False
    root.reset_iter_state()


def accumulates(unit: FSDPModule) -> bool:
    """Whether the unit has gradients that are to be reduced later."""
    return any(
        parameter.unsharded_accumulated_grad is not None
        or getattr(parameter, "_unsharded_param", parameter.sharded_param).grad is not None
        for parameter in _parameters(unit)
    )


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


def before_reduction(unit: FSDPModule, report: Callable[[list[int], list[int]], None]) -> None:
    """Complete the unit's gradients before each reduction, and call `report`.

    FSDP2 leaves parameters without a gradient out of the buffer that it reduces, so ranks that use
    different parameters would add up the wrong ones. Here trained parameters of a unit that was
    used get zeros instead. `report` gets indices in `own_pieces`: of the parameters that have a
    gradient of their own, and of all that are in the buffer, in its order.
    """
    state = unit._get_fsdp_state()
    for group in _groups(unit):
        group.zeropp_reducer = _Reducer(state, group, group.post_backward, report)
        group.post_backward = group.zeropp_reducer
        for module in state._modules:  # a pass may run only some of them
            module.register_forward_pre_hook(group.zeropp_reducer.note_forward)


class _Reducer:
    """FSDP2's `post_backward` of a unit, which reduces its gradients, after completing them."""

    def __init__(self, state: object, group: object, reduce: Callable, report: Callable) -> None:
        self.state, self.group, self.reduce, self.report = state, group, reduce, report
        self.is_due = False  # the unit ran forward, with gradients, since its last reduction

    def note_forward(self, *_: object) -> None:
        self.is_due = self.is_due or torch.is_grad_enabled()

    def __call__(self, *arguments: object) -> None:
        if self.state._is_root:
            self.reduce_others()
        group = self.group
        if group.reduce_grads and (self.is_due or group._training_state != TrainingState.IDLE):
            self.is_due = False
            with_gradient, reduced = _complete_gradients(group.fsdp_params)
            if reduced:
                self.report(with_gradient, reduced)
        self.reduce(*arguments)

    def reduce_others(self) -> None:
        """Reduce the units inside the root whose input needs no gradient before the root itself.

        FSDP2 would do so afterwards, and on other ranks the input may need one.
        """
        for state in reversed(self.state._state_ctx.all_states):
            for group in _groups_of(state):
                reducer = getattr(group, "zeropp_reducer", self)
                if reducer is not self and reducer.is_due and group.reduce_grads:
                    reducer()


def _complete_gradients(parameters: list[FSDPParam]) -> tuple[list[int], list[int]]:
    """Give zeros to trained parameters without a gradient; see `before_reduction`."""
    gathered = {
        index: parameter
        for index, parameter in enumerate(parameters)
        if hasattr(parameter, "_unsharded_param")
    }
    for parameter in gathered.values():
        parameter.accumulate_unsharded_grad_if_needed()
    sums = [parameter.unsharded_accumulated_grad for parameter in gathered.values()]
    dtype = next((total.dtype for total in sums if total is not None), None)
    with_gradient, reduced = [], []
    for index, parameter in gathered.items():
        whole = parameter._unsharded_param
        if dtype is not None:
            parameter.to_accumulated_grad_if_needed()  # FSDP2 reduces gradients of one dtype only
        if parameter.unsharded_accumulated_grad is not None or whole.grad is not None:
            with_gradient.append(index)
        elif not whole.requires_grad:
            continue
        elif dtype is not None and dtype != whole.dtype:
            parameter.unsharded_accumulated_grad = torch.zeros_like(whole, dtype=dtype)
        else:
            whole.grad = torch.zeros_like(whole)
        reduced.append(index)
    return with_gradient, reduced


def name_of(unit: FSDPModule) -> str:
    """Return the unit's name in its root module, after the first forward pass."""
    return next((group._module_fqn for group in _groups(unit)), "") or "the root"


def shards(unit: FSDPModule) -> list[nn.Parameter]:
    """Return the unit's parameters, as shards, in the order of `own_pieces`."""
    return [parameter.sharded_param for parameter in _parameters(unit)]


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
    return _groups_of(unit._get_fsdp_state())


def _groups_of(state: object) -> list:
    if hasattr(state, "_fsdp_param_groups"):
        return state._fsdp_param_groups
    return [state._fsdp_param_group] if state._fsdp_param_group else []  # torch 2.11


def set_gradient_dtypes(unit: FSDPModule) -> None:
    """Set what the unit's gradients are reduced in, if all of it was frozen when it first ran.

    FSDP2 does that once, and asks the parameters that are trained then.
    """
    for group in _groups(unit):
        trained = any(parameter.sharded_param.requires_grad for parameter in group.fsdp_params)
        if trained and group._reset_sharded_params and group._orig_dtype is None:
            group._init_mp_dtypes()


def discard_gradients(unit: FSDPModule, set_to_none: bool = True) -> None:
    """Clear the unit's gradients, those included that FSDP2 accumulates until it reduces them."""
    for group in _groups(unit):
        if reducer := getattr(group, "zeropp_reducer", None):
            reducer.is_due = False
    for parameter in _parameters(unit):
        fsdp_parameters.discard_gradients(parameter, set_to_none)
