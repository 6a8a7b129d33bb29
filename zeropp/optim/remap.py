"""Makes an optimizer that was built on unsharded parameters hold their shards.

Sharding replaces a model's parameters. An optimizer that still held the old ones would silently
train nothing.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from zeropp.errors import InputError

Names = Mapping[torch.Tensor, str]


def names_of(model: nn.Module) -> Names:
    """Return each parameter's name, the first one if it has several."""
    return {parameter: name for name, parameter in model.named_parameters()}


def remap(optimizer: torch.optim.Optimizer, names: Names, model: nn.Module) -> None:
    """Replace the parameters in every group by `model`'s of the same names; options stay.

    `names` are the model's before it was sharded. Raises InputError for a parameter that is not
    the model's, and for an optimizer that has state: it belongs to the whole parameters.
    """
    parameters = dict(model.named_parameters())
    groups = [
        _same_names(group["params"], names, parameters, f"group {index} of the optimizer")
        for index, group in enumerate(optimizer.param_groups)
    ]
    changed = any(
        old is not new
        for group, new_parameters in zip(optimizer.param_groups, groups, strict=True)
        for old, new in zip(group["params"], new_parameters, strict=True)
    )
    if changed and len(optimizer.state):
        raise InputError(
            f"the {type(optimizer).__name__} given to zeropp.initialize has state already, and "
            "sharding cannot keep it: give one without state, or a function that builds one from "
            "parameters (optimizer=lambda parameters: ...)"
        )
    for group, new_parameters in zip(optimizer.param_groups, groups, strict=True):
        group["params"] = new_parameters


def listed(parameters_or_groups: Iterable[Any]) -> list[Any]:
    """Return parameters, or groups of them, as lists, as they may be generators."""
    items = []
    for item in parameters_or_groups:
        if isinstance(item, Mapping):
            parameters = item["params"]
            is_single = isinstance(parameters, torch.Tensor)
            item = {**item, "params": [parameters] if is_single else list(parameters)}
        items.append(item)
    return items


def remapped(parameters_or_groups: Iterable[Any], names: Names, model: nn.Module) -> list[Any]:
    """Return what `listed` returned with the sharded model's parameters in it.

    Raises InputError for a parameter that is not the model's.
    """
    by_name, items = dict(model.named_parameters()), []
    for item in parameters_or_groups:
        if isinstance(item, Mapping):
            parameters = _same_names(item["params"], names, by_name, "model_parameters")
            items.append({**item, "params": parameters})
        else:
            items += _same_names([item], names, by_name, "model_parameters")
    return items


def _same_names(
    old_parameters: Iterable[Any],
    names: Names,
    by_name: Mapping[str, torch.Tensor],
    where: str,
) -> list[torch.Tensor]:
    parameters = []
    for index, old in enumerate(old_parameters):
        if isinstance(old, tuple):  # (name, parameter), as named_parameters() yields them
            old = old[1]
        if old not in names:
            shape = f"of shape {list(old.shape)}" if isinstance(old, torch.Tensor) else repr(old)
            raise InputError(
                f"parameter {index} {shape} in {where} is not one of the model's: build the "
                "optimizer on model.parameters() of the model that zeropp.initialize gets, before "
                "that model is changed"
            )
        parameters.append(by_name[names[old]])
    return parameters
