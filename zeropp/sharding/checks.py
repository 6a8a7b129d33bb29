"""Checks that a model can be sharded, made before anything in it is changed.

FSDP2 reports some of these problems only in the first forward pass, and less clearly.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from zeropp import fsdp_adapter as fsdp
from zeropp.errors import InputError


def require_shardable(model: nn.Module, blocks: Sequence[nn.Module]) -> None:
    """Raise InputError naming the parameters that keep `model` from being sharded by `blocks`."""
    for name, module in model.named_modules():
        if isinstance(module, fsdp.FSDPModule):
            where = f"its {name}" if name else "it"
            raise InputError(f"the model given to zeropp.shard, {where}, is sharded already: "
                             "give a new one")  # fmt: skip
    _require_order(model, blocks)
    for name, parameter in model.named_parameters():
        _require_plain(name, parameter)
    owners: dict[nn.Parameter, tuple[nn.Module, str]] = {}
    trained: dict[nn.Module, tuple[torch.dtype, str]] = {}
    for unit, name, parameter in _by_unit(model, frozenset(blocks), model):
        _require_one_unit(*owners.setdefault(parameter, (unit, name)), unit, name)
        if parameter.requires_grad:
            _require_one_type(*trained.setdefault(unit, (parameter.dtype, name)), parameter, name)


def _require_order(model: nn.Module, blocks: Sequence[nn.Module]) -> None:
    """Require units that are modules within the model, each given once and before what contains it.

    A unit takes all parameters inside it that no earlier one has.
    """
    names = {module: name for name, module in model.named_modules()}
    taken: dict[nn.Module, str] = {}
    for index, block in enumerate(blocks):
        name = names.get(block)
        if not name:
            kind = "the whole model, which is one anyway" if block is model else "not in the model"
            raise InputError(
                f"units= of zeropp.shard: number {index}, a {type(block).__name__}, is {kind}: "
                "give modules inside the model"
            )
        if block in taken:
            outer = "itself" if taken[block] == name else taken[block]
            raise InputError(
                f"units= of zeropp.shard: {name} comes after {outer}, which has its parameters: "
                "give each module once, and one inside another before that"
            )
        for module in block.modules():
            taken.setdefault(module, name)


def _require_plain(name: str, parameter: nn.Parameter) -> None:
    """Require a contiguous floating-point `nn.Parameter` without hooks on accumulated gradients."""
    if fsdp.has_accumulation_hooks(parameter):
        raise InputError(
            f"parameter {name} has a hook of register_post_accumulate_grad_hook, and its gradient "
            "will be accumulated in shards: register the hook on the model's parameter after "
            "sharding, when it gets this rank's part of the mean over ranks"
        )
    kind = type(parameter)
    if kind not in (nn.Parameter, DTensor):
        raise InputError(
            f"parameter {name} is a {kind.__module__}.{kind.__qualname__}, which zeropp does "
            "not know how to gather: use a plain torch.nn.Parameter"
        )
    if not parameter.is_floating_point():
        raise InputError(
            f"parameter {name} is {parameter.dtype}: only floating-point parameters can be "
            "sharded; register it as a buffer, which every rank keeps whole"
        )
    if not parameter.is_contiguous():
        raise InputError(
            f"parameter {name} lies in memory with strides {list(parameter.stride())}, and only "
            "contiguous parameters can be sharded: replace it by "
            "torch.nn.Parameter(parameter.detach().contiguous())"
        )


def _require_one_unit(first: nn.Module, first_name: str, unit: nn.Module, name: str) -> None:
    """Require that a weight belongs to one unit: sharding would turn a shared one into two."""
    if unit is not first:
        raise InputError(
            f"{first_name} and {name} are one parameter in two units that are gathered apart: "
            "give zeropp.shard units= without those two, or do not share it"
        )


def _require_one_type(
    dtype: torch.dtype, first_name: str, parameter: nn.Parameter, name: str
) -> None:
    """Require one dtype per unit, because a unit's gradients are averaged in one buffer."""
    if parameter.dtype != dtype:
        raise InputError(
            f"{first_name} is {dtype} and {name} {parameter.dtype}: the parameters of a unit that "
            "are trained must have one type; call model.float(), and let bf16.enabled or "
            "fp16.enabled choose what is computed in"
        )


def _by_unit(
    module: nn.Module, units: frozenset[nn.Module], unit: nn.Module, prefix: str = ""
) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    """Yield (innermost unit, name, parameter) for every name of a parameter."""
    unit = module if module in units else unit
    for name, parameter in module.named_parameters(recurse=False):
        yield unit, prefix + name, parameter
    for name, child in module.named_children():
        yield from _by_unit(child, units, unit, f"{prefix}{name}.")
