"""What FSDP2 does not do for a parameter: keep its attributes and hooks, discard its gradients.

Private names of `FSDPParam` and of tensors are used here, for torch 2.11 to 2.13.
"""

from typing import Any

import torch


def inherit(parameter: torch.Tensor, original: torch.Tensor) -> None:
    """Give a parameter the attributes and hooks of the one whose place it takes.

    The hooks are shared: those that are added to or removed from either are so for both.
    """
    own = {name: value for name, value in vars(original).items() if not name.startswith("_fsdp")}
    vars(parameter).update(own)
    for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        if (hooks := getattr(original, name)) is not None and hooks is not getattr(parameter, name):
            setattr(parameter, name, hooks)


def has_accumulation_hooks(parameter: torch.Tensor) -> bool:
    """Whether `register_post_accumulate_grad_hook` was called on the parameter."""
    return bool(parameter._post_accumulate_grad_hooks)


def inherit_when_gathered(parameter: Any) -> None:
    """Give the whole parameter of an `FSDPParam` what the sharded one has, in each gather.

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


def discard_gradients(parameter: Any, set_to_none: bool) -> None:
    """Clear all gradients of an `FSDPParam`: sharded, whole, and accumulated in another dtype."""
    holders = [parameter.sharded_param]
    if hasattr(parameter, "_unsharded_param"):
        holders.append(parameter._unsharded_param)
    if set_to_none:
        parameter.unsharded_accumulated_grad = None
        for holder in holders:
            holder.grad = None
        return
    for gradient in (parameter.unsharded_accumulated_grad, *(holder.grad for holder in holders)):
        if gradient is not None:
            gradient.detach().zero_()
