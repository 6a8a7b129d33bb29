"""A model cut into FSDP2's units: its blocks, the rest of it, and what is gathered apart.

Trained parameters beside frozen ones form a unit of their own. The rest of the unit then never
changes, and hpZ keeps it for the whole run. So do layers that keep statistics of batches in fp32,
as they are computed in fp32 where the others are not. A gather starts with a module's forward pass,
so each parameter is gathered with the innermost called module that uses it. 0-d parameters stay
whole on every rank, outside of all units (zeropp/wire/scalar_gradients.py).
"""

from collections.abc import Collection, Sequence
from dataclasses import replace

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from zeropp import fsdp_adapter as fsdp
from zeropp.settings.zero_config import ZeroConfig
from zeropp.sharding.grid import replicas
from zeropp.sharding.plan import DataAxis, UnitPlan, spec_of

Subunits = dict[nn.Module, set[nn.Parameter]]  # module -> parameters its forward pass uses


def plan_units(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    axis: DataAxis,
    config: ZeroConfig,
    *,
    casts_inputs: bool = True,
) -> tuple[UnitPlan, ...]:
    """Return the units of the blocks and of the rest of the model, in forward order, root last."""
    has_shards = axis.nodes.num_ranks > 1 or config.offloads_weights or config.stores_frozen
    like = UnitPlan(
        specs=(),
        axis=axis,
        dtype=getattr(torch, config.compute_format),
        wire_dtype=getattr(torch, config.wire_format),
        regathers=config.stage == 3 and has_shards,
        casts_inputs=casts_inputs,
    )
    units: list[UnitPlan] = []
    taken: set[nn.Module] = set()  # inside a unit already
    for block in blocks:
        units += _plan_unit(block, taken, like, config)
        taken.update(block.modules())
    # The root's own parameters are used first in forward and last in backward or, as with a tied
    # head, at both ends: they stay gathered from its forward to its backward.
    root, *subunits = _plan_unit(model, taken, replace(like, regathers=False), config)
    return (*units, *subunits, replace(root, is_root=True))


def _plan_unit(
    unit: nn.Module, others: Collection[nn.Module], like: UnitPlan, config: ZeroConfig
) -> list[UnitPlan]:
    """Return a unit, and what is gathered apart from it as one or two more.

    These are, under MixZ++, the trained parameters beside its frozen ones, and in 16 bit the
    parameters of layers that keep statistics.
    """
    statistical = {} if like.dtype == torch.float32 else statistical_layers(unit, others)
    in_fp32 = replace(like, dtype=torch.float32, casts_inputs=False)
    if unit in statistical:  # alone
        return [with_parameters(in_fp32, {unit: own_parameters(unit, others)}, config)]
    apart = set().union(*statistical.values())
    trained = trained_subunits(unit, others, apart) if config.stores_frozen else {}
    apart.update(*trained.values())
    own = own_parameters(unit, others) - apart
    subunits = [
        with_parameters(replace(kind, is_apart=True), users, config)
        for users, kind in ((trained, like), (statistical, in_fp32))
        if users
    ]
    return [with_parameters(like, {unit: own}, config), *subunits]


def with_parameters(like: UnitPlan, users: Subunits, config: ZeroConfig) -> UnitPlan:
    """Return a unit like another, of the parameters that these modules use."""
    own = set().union(*users.values())
    parameters = dict.fromkeys(
        parameter for module in users for parameter in module.parameters() if parameter in own
    )
    num_shards = 1 if config.stage == 0 else like.axis.nodes.num_ranks
    bits = config.zeropp.nontrainable_weight_bits if config.stores_frozen else None
    return replace(
        like,
        modules=tuple(users),
        parameters=tuple(parameters),
        specs=tuple(spec_of(parameter, num_shards, bits) for parameter in parameters),
    )


def cut(
    plans: Sequence[UnitPlan], mesh: DeviceMesh, config: ZeroConfig
) -> tuple[fsdp.FSDPModule, ...]:
    """Make FSDP2's units as planned, in place, over the data axis `mesh`; return them in order."""
    if config.stage == 0 and mesh.size() > 1:  # replicas: shards of one rank, averaged over all
        parameters = (parameter for plan in plans for parameter in plan.parameters)
        mesh = replicas(mesh, with_others=any(isinstance(each, DTensor) for each in parameters))
    place = _offload_policy(mesh, config)
    for plan in sorted(plans, key=lambda plan: plan.is_apart):  # a unit cut first hides its modules
        own = set(plan.parameters)
        fsdp.shard_unit(
            [*plan.modules],
            mesh,
            _precision(plan),
            reshard_after_forward=plan.regathers,
            place=place,
            ignored=[p for module in plan.modules for p in module.parameters() if p not in own],
        )
    return tuple(plan.modules[0] for plan in plans)


def _precision(plan: UnitPlan) -> fsdp.MixedPrecisionPolicy:
    """Return the policy: compute in the planned type, accumulate gradients in fp32."""
    return fsdp.MixedPrecisionPolicy(
        param_dtype=plan.dtype,
        reduce_dtype=torch.float32,
        cast_forward_inputs=plan.casts_inputs,
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
