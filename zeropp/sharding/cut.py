"""A model cut into FSDP2's units: its blocks, the rest of it, and what is gathered apart.

Trained parameters beside frozen ones form a unit of their own. The rest of the unit then never
changes, and hpZ keeps it for the whole run. So do layers that keep statistics of batches in fp32,
as they are computed in fp32 where the others are not. A gather starts with a module's forward pass,
so each parameter is gathered with the innermost called module that uses it. 0-d parameters stay
whole on every rank, outside of all units (zeropp/wire/scalar_gradients.py).
"""

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from zeropp import fsdp_adapter as fsdp
from zeropp.settings.zero_config import ZeroConfig
from zeropp.sharding.grid import replicas

Subunits = dict[nn.Module, set[nn.Parameter]]  # module -> parameters its forward pass uses


def shard_units(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    mesh: DeviceMesh,
    config: ZeroConfig,
    cast_forward_inputs: bool,
) -> tuple[fsdp.FSDPModule, ...]:
    """Shard the blocks and the rest of the model; return the units in forward order, root last."""
    stage, ranks = config.zero_optimization.stage, mesh.size()
    if stage == 0 and ranks > 1:  # replicas: shards of one rank, averaged over all
        mesh = replicas(mesh, with_others=_has_other_axes(model))
    regather = stage == 3 and (ranks > 1 or config.offloads_weights or config.stores_frozen)
    options = {
        "mesh": mesh,
        "precision": precision(config, cast_forward_inputs),
        "place": _offload_policy(mesh, config),
    }
    options["scalars"] = {each for each in model.parameters() if not each.ndim}
    units = []
    for block in blocks:
        units += _shard_unit(block, (), config, reshard_after_forward=regather, **options)
    # The root's own parameters are used first in forward and last in backward or, as with a tied
    # head, at both ends: they stay gathered from its forward to its backward.
    inside = {module for block in blocks for module in block.modules()}
    root, *subunits = _shard_unit(model, inside, config, reshard_after_forward=False, **options)
    return (*units, *subunits, root)


def _has_other_axes(model: nn.Module) -> bool:
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def _shard_unit(
    unit: nn.Module,
    others: Collection[nn.Module],
    config: ZeroConfig,
    *,
    precision: fsdp.MixedPrecisionPolicy,
    scalars: set[nn.Parameter],
    **options: Any,
) -> list[fsdp.FSDPModule]:
    """Shard a unit, and what is gathered apart from it as one or two more.

    These are, under MixZ++, the trained parameters beside its frozen ones, and in 16 bit the
    parameters of layers that keep statistics.
    """
    statistical = {} if config.compute_format == "float32" else statistical_layers(unit, others)
    apart = set(scalars).union(*statistical.values())
    subunits = trained_subunits(unit, others, apart) if config.stores_frozen else {}
    in_fp32 = fsdp.MixedPrecisionPolicy(
        param_dtype=torch.float32, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    if unit in statistical:  # alone
        fsdp.shard_unit(unit, precision=in_fp32, ignored=scalars, **options)
        return [unit]
    apart.update(*subunits.values())
    fsdp.shard_unit(unit, precision=precision, ignored=apart, **options)
    return [
        unit,
        *shard_subunits(subunits, apart, precision=precision, **options),
        *shard_subunits(statistical, scalars, precision=in_fp32, **options),
    ]


def shard_subunits(
    subunits: Subunits, ignored: Collection[nn.Parameter] = (), **options: Any
) -> list[fsdp.FSDPModule]:
    """Make one unit of the parameters that a sharded unit ignored; return its first module.

    Others than these may be `ignored`, too.
    """
    if not subunits:
        return []
    modules = list(subunits)
    own = set().union(*subunits.values())
    sharded = [
        parameter
        for module in modules
        for parameter in module.parameters()
        if isinstance(parameter, DTensor) or parameter in ignored and parameter not in own
    ]
    fsdp.shard_unit(modules, ignored=sharded, **options)
    return modules[:1]


def precision(config: ZeroConfig, cast_forward_inputs: bool) -> fsdp.MixedPrecisionPolicy:
    """Return the policy: compute in the configured format, accumulate gradients in fp32."""
    return fsdp.MixedPrecisionPolicy(
        param_dtype=getattr(torch, config.compute_format),
        reduce_dtype=torch.float32,
        cast_forward_inputs=cast_forward_inputs,
    )


def _offload_policy(mesh: DeviceMesh, config: ZeroConfig) -> fsdp.OffloadPolicy:
    if not config.offloads_weights:
        return fsdp.ON_DEVICE
    pinned = config.zero_optimization.offload_param.pin_memory
    return fsdp.CPUOffloadPolicy(pin_memory=pinned and mesh.device_type != "cpu")


def modules_using(
    parameters: set[nn.Parameter], unit: nn.Module, others: Collection[nn.Module]
) -> Subunits:
    """Return the modules inside `unit`, outside `others`, whose forward passes use `parameters`.

    The unit itself is returned for parameters that no called module inside it uses.
    """
    users: Subunits = {}

    def visit(module: nn.Module, called: nn.Module) -> None:
        called = module if _is_called(module) else called
        if used := parameters.intersection(module.parameters(recurse=False)):
            users.setdefault(called, set()).update(used)
        for child in module.children():
            if child not in others:
                visit(child, called)

    visit(unit, unit)
    return users


def trained_subunits(
    unit: nn.Module, others: Collection[nn.Module], apart: Collection[nn.Parameter] = ()
) -> Subunits:
    """Return where to gather the trained parameters of a unit with frozen ones; {} if all train.

    Parameters that the unit itself uses stay in the unit. Modules in `others` and parameters in
    `apart` do not belong to it.
    """
    parameters = own_parameters(unit, others).difference(apart)
    trained = {parameter for parameter in parameters if parameter.requires_grad}
    if trained == parameters:
        return {}
    users = modules_using(trained, unit, others)
    staying = users.pop(unit, set())
    return {module: used - staying for module, used in users.items() if used - staying}


def statistical_layers(unit: nn.Module, others: Collection[nn.Module]) -> Subunits:
    """Return the layers of a unit that keep statistics in fp32, with their parameters.

    With 16-bit parameters PyTorch would not compute them. Modules in `others` are left out.
    """
    layers: Subunits = {}
    for module in unit.modules():
        statistics = getattr(module, "running_mean", None)
        own = {each for each in module.parameters(recurse=False) if each.ndim}
        is_fp32 = isinstance(statistics, torch.Tensor) and statistics.dtype == torch.float32
        if module not in others and is_fp32 and own:
            layers[module] = own
    return layers


def own_parameters(unit: nn.Module, others: Collection[nn.Module]) -> set[nn.Parameter]:
    """Return the parameters of a unit's modules that are not in `others`, 0-d ones left out."""
    modules = (module for module in unit.modules() if module not in others)
    own = (parameter for module in modules for parameter in module.parameters(recurse=False))
    return {parameter for parameter in own if parameter.ndim}


def _is_called(module: nn.Module) -> bool:
    """Whether a module's forward is called: not so for containers, nor for the output projection
    of `nn.MultiheadAttention`, whose weight is read without calling it."""
    has_forward = type(module).forward is not nn.Module.forward
    return has_forward and not isinstance(module, NonDynamicallyQuantizableLinear)
