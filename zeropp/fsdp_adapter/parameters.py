"""What FSDP2 does not do for a parameter, and the parameter groups of units in each version of it.

FSDP2 gathers and reduces a parameter group at once. A unit has one for each mesh that its
parameters are on: usually one, and two where some are sharded over other ranks than the rest of
their block. Parameters keep their attributes and hooks, and their gradients can be discarded.

Private names of `FSDPParam` and of tensors are used here, for torch 2.11 to 2.14.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.tensor import DTensor


@dataclass(frozen=True)
class ParamGroup:
    """One of several parameter groups of a unit, to be used like a unit of these parameters."""

    module: FSDPModule
    index: int

    @property
    def training(self) -> bool:
        return self.module.training


Unit = FSDPModule | ParamGroup


def module_of(unit: Unit) -> FSDPModule:
    """Return the module whose passes gather a unit."""
    return unit.module if isinstance(unit, ParamGroup) else unit


def state_of(unit: Unit) -> object:
    return module_of(unit)._get_fsdp_state()


def parameters_of(unit: Unit) -> list[FSDPParam]:
    return [parameter for group in groups_of(unit) for parameter in group.fsdp_params]


def groups_of(unit: Unit) -> list:
    groups = groups_of_state(state_of(unit))
    return [groups[unit.index]] if isinstance(unit, ParamGroup) else groups


def groups_of_state(state: object) -> list:
    if hasattr(state, "_fsdp_param_groups"):
        return state._fsdp_param_groups
    return [state._fsdp_param_group] if state._fsdp_param_group else []  # torch 2.11


Versions = tuple[int, ...]


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's slice of a possibly distributed tensor, sharing its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def inherit(parameter: torch.Tensor, original: torch.Tensor) -> None:
    """Give a parameter the attributes and hooks of the one whose place it takes.

    The hooks are shared: those that are added to or removed from either are so for both.
    """
    own = {name: value for name, value in vars(original).items() if not name.startswith("_fsdp")}
    vars(parameter).update(own)
    for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        if (hooks := getattr(original, name)) is not None and hooks is not getattr(parameter, name):
            setattr(parameter, name, hooks)


def versions(unit: Unit) -> Versions:
    """Return the versions of the unit's shards: writes into them in place raise one.

    A DTensor and the tensor that it holds have a version each.
    """
    found = []
    for parameter in parameters_of(unit):
        sharded = parameter.sharded_param
        for tensor in (sharded, getattr(sharded, "_local_tensor", sharded)):
            found.append(-1 if tensor.is_inference() else tensor._version)
    return tuple(found)


def share_version(detached: Any, parameter: torch.Tensor) -> None:
    """Let writes into what `detached`, a detached shard, holds raise the shard's version.

    DTensor's own `detach` gives it a version of its own.
    """
    if isinstance(detached, DTensor) and isinstance(parameter, DTensor):
        mine, other = parameter._local_tensor, detached._local_tensor
        if mine is not other and mine.data_ptr() == other.data_ptr():
            detached._local_tensor = mine.detach()


def has_accumulation_hooks(parameter: torch.Tensor) -> bool:
    """Whether `register_post_accumulate_grad_hook` was called on the parameter."""
    return bool(parameter._post_accumulate_grad_hooks)


def hook_gradient(parameter: torch.Tensor, hook: Callable[[torch.Tensor], Any]) -> None:
    """Register a hook of a parameter's gradient once, although it may be frozen now."""
    if hook not in (parameter._backward_hooks or {}).values():
        if parameter.requires_grad:
            parameter.register_hook(hook)
        else:
            parameter.requires_grad_(True).register_hook(hook)
            parameter.requires_grad_(False)


def inherit_when_gathered(parameter: Any) -> None:
    """In each gather, give an `FSDPParam`'s whole parameter what the sharded one has.

    Gradient hooks are thus called with this rank's whole gradient; FSDP2 would never call them.
    Hooks that follow the accumulation are not for whole gradients: FSDP2 calls them itself.
    """
    init_unsharded_param = parameter.init_unsharded_param

    def init_and_inherit() -> None:
        init_unsharded_param()
        sharded, whole = parameter.sharded_param, parameter._unsharded_param
        vars(whole).update(vars(sharded))
        hooks = sharded._backward_hooks
        if hooks is not None and hooks is not whole._backward_hooks:
            whole._backward_hooks = hooks

    parameter.init_unsharded_param = init_and_inherit
