"""An optimizer built on whole parameters, made to hold the shards that took their places.

Sharding replaces a model's parameters. An optimizer that still held the old ones would step them,
and train nothing, in silence.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from zeropp.errors import InputError

Names = Mapping[torch.Tensor, str]


def names_of(model: nn.Module) -> Names:
    """Each parameter's name, its first one where several names share it."""
    return {parameter: name for name, parameter in model.named_parameters()}


def remap(optimizer: torch.optim.Optimizer, names: Names, model: nn.Module) -> None:
    """Replace the parameters in every group by `model`'s of the same names; options stay.

    `names` are the model's before it was sharded. Raises InputError for a parameter that is not
    the model's, and for an optimizer that has state: it belongs to the whole parameters.
    """
    now = dict(model.named_parameters())
    groups = [
        _same_names(group["params"], names, now, f"group {index} of the optimizer")
        for index, group in enumerate(optimizer.param_groups)
    ]
    moved = any(
        old is not new
        for group, renewed in zip(optimizer.param_groups, groups, strict=True)
        for old, new in zip(group["params"], renewed, strict=True)
    )
    if moved and len(optimizer.state):
        raise InputError(
            f"the {type(optimizer).__name__} given to zeropp.initialize has state already, and "
            "sharding cannot keep it: give a fresh one, or a function that makes one from "
            "parameters (optimizer=lambda parameters: ...)"
        )
    for group, renewed in zip(optimizer.param_groups, groups, strict=True):
        group["params"] = renewed


def listed(parameters: Iterable[Any]) -> list[Any]:
    """Parameters, or groups of them, out of generators that would run over a sharded model."""
    found = []
    for parameter in parameters:
        if isinstance(parameter, Mapping):
            inside = parameter["params"]
            parameter = {
                **parameter,
                "params": [inside] if isinstance(inside, torch.Tensor) else list(inside),
            }
        found.append(parameter)
    return found


def remapped(parameters: Iterable[Any], names: Names, model: nn.Module) -> list[Any]:
    """What `listed` gave, as the sharded model holds it.

    Raises InputError for a parameter that is not the model's.
    """
    now, found = dict(model.named_parameters()), []
    for parameter in parameters:
        if isinstance(parameter, Mapping):
            inside = _same_names(parameter["params"], names, now, "model_parameters")
            found.append({**parameter, "params": inside})
        else:
            found += _same_names([parameter], names, now, "model_parameters")
    return found


def _same_names(
    parameters: Iterable[Any], names: Names, now: Mapping[str, torch.Tensor], where: str
) -> list[torch.Tensor]:
    found = []
    for index, one in enumerate(parameters):
        if isinstance(one, tuple):  # (name, parameter), as named_parameters() gives them
            one = one[1]
        if one not in names:
            shape = f"of shape {list(one.shape)}" if isinstance(one, torch.Tensor) else repr(one)
            raise InputError(
                f"parameter {index} {shape} in {where} is not one of the model's: build the "
                "optimizer on model.parameters() of the model that zeropp.initialize gets, before "
                "that model is changed"
            )
        found.append(now[names[one]])
    return found
