"""A model cut into FSDP2's units: its blocks, the rest of it, and what is gathered apart.

Trained parameters beside frozen ones form a unit of their own. The rest of the unit then never
changes, and hpZ keeps it for the whole run. So do layers that keep statistics of batches in fp32,
as they are computed in fp32 where the others are not. A gather starts with a module's forward pass,
so each parameter is gathered with the innermost called module that uses it. 0-d parameters stay
whole on every rank, outside of all units (zeropp/wire/gradients.py).
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from zeropp import fsdp_adapter as fsdp
from zeropp.settings.zero_config import ZeroConfig
from zeropp.sharding.grid import replicas
from zeropp.sharding.plan import DataAxis, Parts, UnitPlan


class Place(NamedTuple):
    """A parameter in a module. One that modules share has several places.

    name: in the whole model.
    unit: the innermost one that contains the module, or the model.
    user: the innermost module of the unit whose forward pass is called and reads the parameter, or
    the unit.
    """

    name: str
    parameter: nn.Parameter
    module: nn.Module
    user: nn.Module
    unit: nn.Module


Places = Iterable[Place]
Subunits = dict[nn.Module, set[nn.Parameter]]  # module -> parameters its forward pass uses


def plan_units(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    places: Places,
    axis: DataAxis,
    config: ZeroConfig,
    *,
    apart: Mapping[nn.Module, DataAxis] = MappingProxyType({}),
    casts_inputs: bool = True,
) -> tuple[UnitPlan, ...]:
    """Return the units of the blocks and of the rest of the model, in forward order, root last.

    `places` are those of the model's parameters in these units. Modules `apart` are units of their
    own inside the blocks, on axes of their own; each follows the block that it is in.
    """
    has_shards = axis.num_losses > 1 or config.always_gathers
    like = UnitPlan(
        specs=(),
        axis=axis,
        dtype=getattr(torch, config.compute_format),
        wire_dtype=getattr(torch, config.wire_format),
        regathers=config.stage == 3 and has_shards,
        casts_inputs=casts_inputs,
        num_shards=1 if config.stage == 0 else axis.nodes.num_ranks,
        stored_bits=config.zeropp.nontrainable_weight_bits if config.stores_frozen else None,
        placement=config.placement,
    )
    units: list[UnitPlan] = []
    own = by_unit(places)
    for block in blocks:
        units += _plan_unit(block, own.get(block, ()), like)
        for module in filter(apart.__contains__, block.modules() if apart else ()):
            its_axis = apart[module]
            ranks = its_axis.nodes.num_ranks
            kind = replace(
                like,
                axis=its_axis,
                num_shards=1 if config.stage == 0 else ranks,
                is_apart=True,
                casts_inputs=False,  # inputs are what the block computes
            )
            units += _plan_unit(module, own.get(module, ()), kind)
    # The root's own parameters are used first in forward and last in backward or, as with a tied
    # head, at both ends: they stay gathered from its forward to its backward.
    root, *subunits = _plan_unit(model, own.get(model, ()), replace(like, regathers=False))
    return (*units, *subunits, replace(root, is_root=True))


def _plan_unit(unit: nn.Module, places: Places, like: UnitPlan) -> list[UnitPlan]:
    """Return a unit, and what is gathered apart from it as one or two more.

    These are, under MixZ++ and hpZ, the trained parameters beside its frozen ones, and in 16 bit
    the parameters of layers that keep statistics.
    """
    own = sharded_parameters(places)
    statistical = {} if like.dtype == torch.float32 else _statistical_layers(places)
    in_fp32 = replace(like, dtype=torch.float32, casts_inputs=False)
    if unit in statistical:  # alone
        return [in_fp32.with_parameters([unit], own)]
    apart = set().union(*statistical.values())
    trained = trained_subunits(unit, places, apart) if like.separates_trained else {}
    apart.update(*trained.values())
    units = [like.with_parameters([unit], (each for each in own if each not in apart))]
    for users, kind in ((trained, like), (statistical, in_fp32)):
        if users:
            used = set().union(*users.values())
            subunit = replace(kind, is_apart=True)
            units.append(subunit.with_parameters(users, (each for each in own if each in used)))
    return units


def cut(plans: Sequence[UnitPlan]) -> tuple[fsdp.FSDPModule, ...]:
    """Make FSDP2's units as planned, in place, each over its axis; return them in order."""
    copies: dict[DeviceMesh, DeviceMesh] = {}
    for plan in plans:
        mesh = plan.axis.mesh
        if plan.num_shards < mesh.size() and mesh not in copies:  # shards of one rank, averaged
            same = (
                parameter
                for each in plans
                if each.axis is plan.axis
                for parameter in each.parameters
            )
            copies[mesh] = replicas(
                mesh, with_others=any(isinstance(each, DTensor) for each in same)
            )
    for plan in sorted(plans, key=lambda plan: plan.is_apart):  # a unit cut first hides its modules
        fsdp.shard_unit(
            plan.modules,
            plan.parameters,
            copies.get(plan.axis.mesh, plan.axis.mesh),
            fsdp.MixedPrecisionPolicy(
                param_dtype=plan.dtype,
                reduce_dtype=torch.float32,
                cast_forward_inputs=plan.casts_inputs,
            ),
            reshard_after_forward=plan.regathers,
            on_host=plan.placement.weights is not None,
            pin_memory=plan.placement.is_pinned and plan.axis.mesh.device_type != "cpu",
        )
    return tuple(plan.modules[0] for plan in plans)


def parts_of(meshes: Mapping[nn.Module, DeviceMesh]) -> Parts:
    """Return this rank's part of each whole parameter of these modules, a DTensor.

    The first dim, which must be divisible, is split over the last axis of the module's mesh.
    """
    parts: dict[nn.Parameter, nn.Parameter] = {}
    for module, mesh in meshes.items():
        axis = mesh[mesh.mesh_dim_names[-1]]
        for whole in module.parameters():
            if not isinstance(whole, DTensor) and whole not in parts:
                local = whole.detach().chunk(axis.size())[axis.get_local_rank()].clone()
                part = DTensor.from_local(local, axis, [Shard(0)], run_check=False)
                parts[whole] = nn.Parameter(part, requires_grad=whole.requires_grad)
                fsdp.inherit(parts[whole], whole)
    return parts


def replace_by_parts(modules: Iterable[nn.Module], parts: Parts) -> None:
    """Let each rank keep its part of the whole parameters of these modules, in place."""
    for module in modules:
        for owner in module.modules():
            for name, parameter in tuple(owner.named_parameters(recurse=False)):
                if parameter in parts:
                    owner.register_parameter(name, parts[parameter])


def trained_subunits(
    unit: nn.Module, places: Places, apart: Collection[nn.Parameter] = ()
) -> Subunits:
    """Return where to gather the trained parameters of a unit with frozen ones; {} if all train.

    Parameters that the unit itself uses stay in the unit. Those in `apart` do not belong to it.
    """
    parameters = [each for each in sharded_parameters(places) if each not in apart]
    trained = {parameter for parameter in parameters if parameter.requires_grad}
    if len(trained) == len(parameters):
        return {}
    users = by_user(places, trained)
    staying = users.pop(unit, set())
    return {module: used - staying for module, used in users.items() if used - staying}


def _statistical_layers(places: Places) -> Subunits:
    """Return the layers that keep statistics in fp32, with their parameters.

    With 16-bit parameters PyTorch would not compute them.
    """
    layers: Subunits = {}
    for place in places:
        statistics = getattr(place.module, "running_mean", None)
        is_fp32 = isinstance(statistics, torch.Tensor) and statistics.dtype == torch.float32
        if is_fp32 and place.parameter.ndim:
            layers.setdefault(place.module, set()).add(place.parameter)
    return layers


def places_of(
    model: nn.Module, units: Collection[nn.Module] = (), parts: Parts = MappingProxyType({})
) -> list[Place]:
    """Return the places of all parameters, in the order of `model.parameters()`.

    `units` are modules inside the model. Parameters that have `parts` are taken to be these.
    """
    walk = _walk(model, frozenset(units), user=model, unit=model, prefix="")
    return [each._replace(parameter=parts.get(each.parameter, each.parameter)) for each in walk]


def by_unit(places: Places) -> dict[nn.Module, list[Place]]:
    """Return the places in each unit that has any of its own."""
    units: dict[nn.Module, list[Place]] = {}
    for place in places:
        units.setdefault(place.unit, []).append(place)
    return units


def by_user(places: Places, parameters: Collection[nn.Parameter]) -> Subunits:
    """Return the modules whose forward passes use `parameters`, and which ones each does."""
    users: Subunits = {}
    for place in places:
        if place.parameter in parameters:
            users.setdefault(place.user, set()).add(place.parameter)
    return users


def sharded_parameters(places: Places) -> list[nn.Parameter]:
    """Return the parameters that can be sharded, each once: all but 0-d ones."""
    return list(dict.fromkeys(place.parameter for place in places if place.parameter.ndim))


def _walk(
    module: nn.Module,
    units: frozenset[nn.Module],
    *,
    user: nn.Module,
    unit: nn.Module,
    prefix: str,
) -> Iterator[Place]:
    if module in units:
        user = unit = module
    elif is_called(module):
        user = module
    for name, parameter in module.named_parameters(recurse=False):
        yield Place(prefix + name, parameter, module, user, unit)
    for name, child in module.named_children():
        yield from _walk(child, units, user=user, unit=unit, prefix=f"{prefix}{name}.")


def is_called(module: nn.Module) -> bool:
    """Whether a module's forward is called: not so for containers, nor for the output projection
    of `nn.MultiheadAttention`, whose weight is read without calling it."""
    has_forward = type(module).forward is not nn.Module.forward
    return has_forward and not isinstance(module, NonDynamicallyQuantizableLinear)
