"""Makes an optimizer that was built on unsharded parameters hold their shards, where it can.

Sharding replaces a model's parameters. An optimizer that still held the old ones would silently
train nothing. One that cannot update shards is found when it is made, not at its first step.
"""

import logging
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from zeropp.errors import InputError
from zeropp.optim.sharded_optimizer import takes_factor

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


_FUSED = (torch.optim.Adam, torch.optim.AdamW)  # PyTorch has a rule for their kernels on shards
log = logging.getLogger("zeropp")
# By the names of classes, as other libraries have optimizers of these names too.
_REFUSED = MappingProxyType(
    {
        "Adafactor": "its factors are means over whole matrices, and ranks have parts of them; for "
        "less memory use offload_optimizer, or zeropp.optim.CPUAdam(fp32_optimizer_states=False)",
        "LBFGS": "it evaluates the loss several times in each step; use torch.optim.AdamW",
        "Rprop": "PyTorch has no rule for its operations on shards; use torch.optim.RMSprop",
        "SparseAdam": "gradients of shards are not sparse; use torch.optim.Adam, and "
        "torch.nn.Embedding(sparse=False)",
    }
)


def require_on_shards(optimizer: torch.optim.Optimizer) -> None:
    """Raise InputError for an optimizer that cannot update the shards that it holds.

    Where PyTorch cannot update all parameters of a group in one call, `foreach` and `fused` are
    switched off, with a line.
    """
    kinds = [{isinstance(x, DTensor) for x in group["params"]} for group in optimizer.param_groups]
    if True not in set().union(*kinds):
        return
    for kind in type(optimizer).__mro__:
        if kind.__name__ in _REFUSED:
            raise InputError(
                f"{type(optimizer).__name__} cannot update sharded weights: "
                f"{_REFUSED[kind.__name__]}"
            )
    if takes_factor(optimizer):
        return
    for group, are_sharded in zip(optimizer.param_groups, kinds, strict=True):
        is_mixed, fuses = len(are_sharded) == 2, isinstance(optimizer, _FUSED)
        for name, is_taken in (("foreach", not is_mixed), ("fused", not is_mixed and fuses)):
            if group.get(name) and True in are_sharded and not is_taken:
                group[name] = False
                which = "parameters of which only some are sharded" if is_mixed else "shards"
                log.info("%s: %s has no effect on %s", type(optimizer).__name__, name, which)
