"""The only file that knows FSDP2's private names, for torch 2.11 to 2.13.

FSDP2 is the engine (docs/adr/0001): it gathers a unit's parameters before its forward and
backward and reduces their gradients after. Everything of ours enters by its extension points.
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
from torch.distributed.tensor import DTensor

__all__ = [
    "ON_DEVICE", "AllGather", "CPUOffloadPolicy", "FSDPModule", "MixedPrecisionPolicy",
    "OffloadPolicy", "Piece", "ReduceScatter", "Shard", "after_backward", "backward_id",
    "forget_gathered", "gather_ahead", "has_run", "in_backward", "refresh_parameters", "may_be_stepped",
    "may_reduce_later", "own_pieces", "own_shards", "shard_like", "shard_unit", "store",
    "take_gradients", "use_all_gather", "use_reduce_scatter", "watch_gradients",
]

ON_DEVICE = OffloadPolicy()  # where shards lie, if not on the host
# Gathers under way before a unit's forward. With one, links between nodes would stand idle while
# that one takes its second hop; each costs one more gathered unit of memory.
AHEAD = 2


@dataclass(frozen=True, kw_only=True)
class Piece:
    """One parameter's part in its unit's buffers: `elements` of one rank's padded shard.

    packed_bytes: what travels of it where that is stored as codes; 0 where it is numbers.
    """

    elements: int
    ndim: int
    trainable: bool
    packed_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class Shard:
    """One parameter of a unit, and what this rank holds of it."""

    piece: Piece
    local: torch.Tensor
    parameter: object  # FSDP2's own


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

    Several modules make one unit together; its collectives are then those of the first. `ignored`
    are sharded by others.
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
    """Let `comm` gather the unit's weights."""
    unit.set_custom_all_gather(comm)


def use_reduce_scatter(unit: FSDPModule, comm: ReduceScatter) -> None:
    """Let `comm` average the unit's gradients: called with the op SUM, and to divide by itself."""
    unit.set_custom_reduce_scatter(comm)
    unit.set_force_sum_reduction_for_comms(True)
    unit.set_gradient_divide_factor(1.0)


def gather_ahead(root: FSDPModule, blocks: Sequence[FSDPModule]) -> None:
    """Start each unit's gather while the units before it compute, `AHEAD` of them.

    Without streams (CPU) nothing overlaps unless the gathers are asynchronous and prefetched.
    """
    root._set_unshard_async_op(True)
    units = (root, *blocks)
    for index, unit in enumerate(blocks):
        units[index].set_modules_to_forward_prefetch([unit, *blocks[index + 1 : index + AHEAD]])


def own_pieces(unit: FSDPModule) -> tuple[Piece, ...]:
    """The unit's own parameters (not those of units inside it), in the order of its buffers."""
    return tuple(map(_piece, _parameters(unit)))


def own_shards(unit: FSDPModule) -> tuple[Shard, ...]:
    """The unit's own parameters, in the order of its buffers; not within a pass."""
    for group in _groups(unit):
        group.reshard()
    return tuple(
        Shard(piece=_piece(one), local=one.sharded_param._local_tensor, parameter=one)
        for one in _parameters(unit)
    )


def refresh_parameters(units: Iterable[FSDPModule]) -> None:
    """Take the parameters that were put into modules in the places of those known so far."""
    for unit in units:
        for one in _parameters(unit):
            one.reset_sharded_param()


def store(shard: Shard, stored: torch.Tensor) -> None:
    """Let `stored`, a tensor with FSDP2's hooks around gathers, be this rank's part.

    What was gathered of the parameter before is forgotten. FSDP2 looks for hooks when it shards;
    here they come later. `stored` tells the storage that FSDP2 compares with its own.
    """
    one, old = shard.parameter, shard.parameter.sharded_param
    if old.is_meta:  # a tensor's device does not change
        one.sharded_param = nn.Parameter(shard_like(old, stored), requires_grad=old.requires_grad)
        one._setattr_on_modules(one.sharded_param)
    else:
        old._local_tensor = stored
    one._sharded_param_data = stored.packed
    one._init_extensions()
    one.all_gather_outputs = []
    if hasattr(one, "_unsharded_param"):
        del one._unsharded_param


def in_backward(unit: FSDPModule) -> bool:
    """Whether what FSDP2 is doing to this unit belongs to a backward pass."""
    groups = _groups(unit)
    return bool(groups) and groups[0]._training_state == TrainingState.PRE_BACKWARD


def forget_gathered(unit: FSDPModule) -> None:
    """Free the unit's whole weights, and a gather of them that was begun and never waited for."""
    for group in _groups(unit):
        if group._training_state != TrainingState.IDLE:
            continue  # in use
        if (begun := group._all_gather_result) is not None:
            if begun.all_gather_event is not None:
                group.device_handle.current_stream().wait_event(begun.all_gather_event)
            if isinstance(begun.all_gather_work, dist.Work):
                begun.all_gather_work.wait()
            group._all_gather_result = None
        group.reshard()


def may_be_stepped(unit: FSDPModule) -> bool:
    """Whether an optimizer may change the unit: it is trained, or has gradients from before."""
    parameters = (one.sharded_param for one in _parameters(unit))
    return any(one.requires_grad or one.grad is not None for one in parameters)


def may_reduce_later(unit: FSDPModule) -> bool:
    """Whether nobody reads the unit's reduced gradients before the backward pass has ended.

    FSDP2 reads them at once where it adds them to gradients that are there already, where it casts
    them to another dtype, and for hooks that run when a gradient has been accumulated.
    """
    parameters = [one.sharded_param for one in _parameters(unit) if one.sharded_param.requires_grad]
    return all(
        one.grad is None and one.dtype == torch.float32 and not one._post_accumulate_grad_hooks
        for one in parameters
    )


def backward_id() -> int:
    """A number for the backward pass that is running on this thread; -1 for none."""
    return torch._C._current_graph_task_id()


def after_backward(callback: Callable[[], None]) -> None:
    """Call `callback` at the end of the running backward pass, before `backward()` returns."""
    Variable._execution_engine.queue_callback(callback)


def has_run(unit: FSDPModule) -> bool:
    """Whether the unit has been used, and its parameters' dtypes are settled."""
    return any(group._reset_sharded_params for group in _groups(unit))


def shard_like(parameter: DTensor, local: torch.Tensor) -> DTensor:
    """A tensor sharded as `parameter`, of this rank's part `local`, on whatever device that is."""
    return DTensor(local, parameter._spec, requires_grad=False)


def take_gradients(
    unit: FSDPModule, take: Callable[[nn.Parameter, torch.Tensor], None]
) -> None:
    """Give `take` this rank's part of each averaged gradient, in fp32, and leave no `.grad`.

    It is called for each reduction as that is queued, on its stream. FSDP2 rounds means to their
    parameters' dtype; what it rounds is asked for here.
    """
    rest: list[torch.Tensor] = []  # what is left of the buffer of means, in the order of parameters

    def keep(means: torch.Tensor) -> None:
        rest[:] = [means]

    def taken(parameter: nn.Parameter, padded: int) -> None:
        local, parameter.grad = parameter.grad._local_tensor, None
        means = rest.pop()
        if padded < means.numel():  # an empty rest would keep the buffer
            rest.append(means[padded:])
        take(parameter, means[: local.numel()].view(local.shape))

    unit.set_all_reduce_hook(keep)
    for one in _parameters(unit):
        if one.sharded_param.requires_grad:
            hook = partial(taken, padded=one.padded_sharded_param_size.numel())
            one.sharded_param.register_post_accumulate_grad_hook(hook)


def watch_gradients(unit: FSDPModule) -> Callable[[], tuple[int, ...]]:
    """A function that says which of `own_pieces` got gradients since it was last called.

    FSDP2 leaves parameters without a gradient out of the buffer it reduces and does not say which.
    """
    seen: set[int] = set()
    watched: set[int] = set()

    def watch(*_: object) -> None:
        for index, one in enumerate(_parameters(unit)):
            if index not in watched and one._unsharded_param.requires_grad:
                one._unsharded_param.register_post_accumulate_grad_hook(
                    lambda _, index=index: seen.add(index)
                )
                watched.add(index)

    def take() -> tuple[int, ...]:
        taken = tuple(sorted(seen))
        seen.clear()
        return taken

    for module in unit._get_fsdp_state()._modules:  # a pass may run some of them only
        module.register_forward_pre_hook(watch)  # after FSDP2's own, which gathers the parameters
    return take


def _piece(one: object) -> Piece:
    is_packed = hasattr(one.sharded_param._local_tensor, "fsdp_pre_all_gather")
    return Piece(
        elements=one.padded_sharded_param_size.numel(),
        ndim=len(one._orig_size),
        trainable=one.sharded_param.requires_grad,
        packed_bytes=one._sharded_param_data.nbytes if is_packed else 0,
    )


def _parameters(unit: FSDPModule) -> list:
    return [one for group in _groups(unit) for one in group.fsdp_params]


def _groups(unit: FSDPModule) -> list:
    state = unit._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return state._fsdp_param_groups
    return [state._fsdp_param_group] if state._fsdp_param_group else []  # torch 2.11
