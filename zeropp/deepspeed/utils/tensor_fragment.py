"""`deepspeed.utils.tensor_fragment`: read and write what an engine holds of a parameter.

Each function takes a parameter of `engine.module`. Those with `full` in their names work with whole
tensors: all ranks call them, and write the same value. Those with `local` work with the part that
this rank has. What is read is a copy in fp32, or None: of a frozen parameter, and where there is no
gradient or no such state yet. Gradients are those that `backward` has left: means over the ranks,
or this rank's own sum where they are averaged at a step's end and it has not ended; under fp16 they
are multiplied by the loss scale, and `step()` clears them. All functions raise InputError for a
tensor that is no engine's, inside `GatheredParameters`, and for a value of another shape.
"""

from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import nn

from zeropp.deepspeed.parameter_values import ParameterValues, values_of
from zeropp.errors import InputError


def safe_get_full_fp32_param(param: nn.Parameter, *, whole: bool = True) -> torch.Tensor | None:
    """Return the whole fp32 weight."""
    return (values := values_of(param)) and values.read(values.weight, whole=whole)


def safe_get_full_grad(param: nn.Parameter, *, whole: bool = True) -> torch.Tensor | None:
    """Return the whole gradient."""
    return (values := values_of(param)) and values.read(values.gradient, whole=whole)


def safe_get_full_optimizer_state(
    param: nn.Parameter, optim_state_key: str, *, whole: bool = True
) -> torch.Tensor | None:
    """Return a whole state of the optimizer, such as Adam's `exp_avg`."""
    return (values := values_of(param)) and values.read(values.state(optim_state_key), whole=whole)


def safe_set_full_fp32_param(
    param: nn.Parameter, value: torch.Tensor, *, whole: bool = True
) -> None:
    """Set the fp32 weight, and with it the rounded one that the model computes with."""
    if (values := values_of(param)) is not None:
        values.write_weight(value, whole=whole)


def safe_set_full_grad(param: nn.Parameter, value: torch.Tensor, *, whole: bool = True) -> None:
    """Set the gradient that the next step uses. Raises InputError if there is none."""
    if (values := values_of(param)) is not None:
        values.write(_gradient(values), value, whole=whole)


def safe_set_full_optimizer_state(
    param: nn.Parameter, value: torch.Tensor, optim_state_key: str, *, whole: bool = True
) -> None:
    """Set a state of the optimizer. Raises InputError if there is none of that name."""
    if (values := values_of(param)) is not None:
        values.write(_state(values, optim_state_key), value, whole=whole)


safe_get_local_fp32_param = partial(safe_get_full_fp32_param, whole=False)
"""Return this rank's rows of the fp32 weight."""
safe_get_local_grad = partial(safe_get_full_grad, whole=False)
"""Return this rank's rows of the gradient, or its whole one before it was averaged."""
safe_get_local_optimizer_state = partial(safe_get_full_optimizer_state, whole=False)
"""Return this rank's rows of a state of the optimizer."""
safe_set_local_fp32_param = partial(safe_set_full_fp32_param, whole=False)
"""Set this rank's rows of the weight; all ranks call it, each for its own."""
safe_set_local_grad = partial(safe_set_full_grad, whole=False)
"""Set this rank's rows of the gradient. Raises InputError if there is none."""
safe_set_local_optimizer_state = partial(safe_set_full_optimizer_state, whole=False)
"""Set this rank's rows of a state of the optimizer. Raises InputError if there is none."""


def safe_update_full_grad_vectorized(
    param_list: Iterable[nn.Parameter],
    update_func: Callable[[torch.Tensor, nn.Parameter], torch.Tensor],
) -> None:
    """Set the gradient of each trained parameter to `update_func(gradient, parameter)`."""
    for param in param_list:
        if (values := values_of(param)) is not None:
            gradient = _gradient(values)
            new = update_func(values.read(gradient, whole=True), param)
            values.write(gradient, new, whole=True)


def _gradient(values: ParameterValues) -> torch.Tensor:
    if (gradient := values.gradient) is None:
        raise InputError("there is no gradient to set: call this between backward and step")
    return gradient


def _state(values: ParameterValues, key: str) -> torch.Tensor:
    state = values.state(key)
    if state is None:
        raise InputError(
            f"the optimizer has no state {key!r} of the parameter: it has its state after the "
            "first step, or a checkpoint"
        )
    return state
