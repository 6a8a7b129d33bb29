"""Deep copies of sharded modules: the plain modules that they were, without FSDP2 and without us.

The class that FSDP2 makes for a sharded module refuses `copy.deepcopy`. That class belongs to all
users of `fully_shard`: here it refuses all modules but those that say how they are copied.
"""

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY
from torch.distributed.fsdp import FSDPModule, fully_shard

MakeCopy = Callable[[nn.Module, dict], nn.Module]
SHARDING = ("torch.distributed.fsdp.", "zeropp.")  # whose hooks and methods stay behind
# What FSDP2 notes on each module for Dynamo, and a compiled forward, as `nn.Module` leaves it out.
LEFT_OUT = ("_is_fsdp_managed_module", "_fsdp_use_orig_params", "_compiled_call_impl")


def use_deepcopy(unit: FSDPModule, make_copy: MakeCopy) -> None:
    """Let `copy.deepcopy` of a unit return `make_copy(unit, memo)`."""
    unit._get_fsdp_state().make_copy = make_copy
    fsdp_class = type(unit)
    if fsdp_class.__deepcopy__.__module__ != __name__:
        fsdp_class.__deepcopy__ = _if_known(fsdp_class.__deepcopy__)


def plain_copy(
    module: nn.Module, weights: Iterable[tuple[nn.Parameter, torch.Tensor]], memo: dict
) -> nn.Module:
    """Return a deep copy of the module as it was before it was sharded.

    Its parameters hold `weights`, whole values for each of the module's, and have no gradients.
    Hooks of others are copied; `__deepcopy__` and `__getstate__` of modules are not called.
    """
    for parameter, whole in weights:
        if id(parameter) not in memo:
            memo[id(parameter)] = nn.Parameter(whole, parameter.requires_grad)
    new = [each for each in module.modules() if id(each) not in memo]
    for each in new:
        original = _original_class(each)
        memo[id(each)] = original.__new__(original)
    for each in new:
        memo[id(each)].__setstate__(copy.deepcopy(_own_attributes(each), memo))
    return memo[id(module)]


def _if_known(refuse: Callable) -> Callable:
    def __deepcopy__(unit: FSDPModule, memo: dict) -> nn.Module:
        make_copy = getattr(unit._get_fsdp_state(), "make_copy", refuse)
        return make_copy(unit, memo)

    return __deepcopy__


def _original_class(module: nn.Module) -> type[nn.Module]:
    classes = type(module).__mro__
    return classes[classes.index(FSDPModule) + 1] if FSDPModule in classes else classes[0]


def _own_attributes(module: nn.Module) -> dict[str, Any]:
    """Return a module's attributes without those that sharding has added."""
    attributes = {
        name: value
        for name, value in vars(module).items()
        if name not in LEFT_OUT and not _is_of_sharding(value)
    }
    hooks = {name: held for name, held in attributes.items() if _are_hooks(name, held)}
    removed = {
        number for held in hooks.values() for number, each in held.items() if _is_of_sharding(each)
    }
    for name, held in hooks.items():
        kept = ((number, each) for number, each in held.items() if number not in removed)
        attributes[name] = type(held)(kept)
    for name in (STATE_KEY, REGISTRY_KEY):  # what composable functions know of it, by function
        known = attributes.pop(name, {})
        others = {each: known[each] for each in known if _name(each) != _name(fully_shard)}
        if others:
            attributes[name] = others
    return attributes


def _name(function: Callable | str) -> str:
    return getattr(function, "__name__", function)


def _are_hooks(name: str, value: Any) -> bool:
    return "_hooks" in name and isinstance(value, dict)


def _is_of_sharding(value: Any) -> bool:
    """Whether a hook or a method was defined by what shards modules."""
    return callable(value) and _origin(value).startswith(SHARDING)


def _origin(function: Callable) -> str:
    """Return the name of the Python module in which a function, or what it wraps, was defined.

    `__module__` is that of the original where a method was replaced.
    """
    for part in ("__func__", "func", "hook"):  # of a method, a partial, PyTorch's wrapped hook
        if (inner := getattr(function, part, None)) is not None:
            return _origin(inner)
    names = getattr(function, "__globals__", {})
    return names.get("__name__") or type(function).__module__
