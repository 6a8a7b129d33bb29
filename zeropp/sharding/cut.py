"""A model cut into FSDP2's units: its blocks, the rest of it, and what is gathered apart.

Trained parameters beside frozen ones form a unit of their own. The rest of the unit then never
changes, and hpZ keeps it for the whole run. So do layers that keep statistics of batches in fp32,
as they are computed in fp32 where the others are not. A gather starts with a module's forward pass,
so each parameter is gathered with the innermost called module that uses it. 0-d parameters stay
whole on every rank, outside of all units (zeropp/wire/gradients.py).
"""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from zeropp import fsdp_adapter as fsdp
from zeropp.fsdp_adapter import ShardSpec
from zeropp.ranks.groups import shared_group
from zeropp.settings.zero_config import ZeroConfig
from zeropp.sharding.grid import find_nodes, first_axis, ranks_of
from zeropp.sharding.plan import DataAxis, Plan, UnitPlan
from zeropp.wire.quantized_shard import stored_layout
from zeropp.wire.rank_group import everyone


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


def outermost_blocks(module: nn.Module, *, in_list: bool = False) -> Sequence[nn.Module]:
    """Return the entries of the outermost `nn.ModuleList`s that have parameters, in order.

    A block that is listed several times, as in models that share layers, is returned once. Entries
    without a forward pass, such as lists and dicts, count as what is in them.
    """
    blocks: dict[nn.Module, None] = {}
    in_list = in_list or isinstance(module, nn.ModuleList)
    for child in module.children():
        is_block = in_list and is_called(child) and not isinstance(child, nn.ModuleList)
        for block in [child] if is_block else outermost_blocks(child, in_list=in_list):
            if any(True for _ in block.parameters()):
                blocks[block] = None
    return list(blocks)


def places_of(
    model: nn.Module,
    units: Collection[nn.Module] = (),
    parts: Mapping[nn.Parameter, nn.Parameter] = MappingProxyType({}),
) -> list[Place]:
    """Return the places of all parameters, in the order of `model.parameters()`.

    `units` are modules inside the model. Parameters that have `parts` are taken to be these.
    """
    walk = _walk(model, frozenset(units), user=model, unit=model, prefix="")
    return [each._replace(parameter=parts.get(each.parameter, each.parameter)) for each in walk]


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


def plan_model(
    model: nn.Module,
    mesh: DeviceMesh | None,
    data: DeviceMesh | None,
    config: ZeroConfig,
    *,
    blocks: Sequence[nn.Module],
    places: Places,
    own_meshes: Mapping[nn.Module, DeviceMesh],
    casts_inputs: bool,
    keeps_root: bool,
    calls_units: bool,
) -> Plan:
    """Return what `shard` does over `data`, an axis of the mesh; without one it has no units.

    own_meshes: those of modules whose parameters other ranks split and shard.
    """
    plan = Plan(
        stage=config.stage,
        reduces_once=config.reduces_once,
        keeps_roots=keeps_root or config.reduces_once,
        calls_units=calls_units,
        compute_dtype=getattr(torch, config.compute_format),
    )
    if data is None:
        return plan
    axis = _axis_of(mesh, data, config, data.size())
    meshes = dict.fromkeys(own_meshes.values())
    axes = {each: _axis_of(each, first_axis(each), config, data.size()) for each in meshes}
    units = plan_units(
        model,
        blocks,
        places,
        axis,
        config,
        apart={module: axes[each] for module, each in own_meshes.items()},
        casts_inputs=casts_inputs,
    )
    return replace(plan, units=units)


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
    # The root's own parameters are used first in forward and last in backward (tied embeddings in
    # both): they stay gathered from its forward to its backward.
    root, *subunits = _plan_unit(model, own.get(model, ()), replace(like, regathers=False))
    return (*units, *subunits, replace(root, is_root=True))


def _plan_unit(unit: nn.Module, places: Places, like: UnitPlan) -> list[UnitPlan]:
    """Return a unit, and what is gathered apart from it as one or two more.

    These are, with hpZ and where frozen parameters are codes, the trained ones beside these, and in
    16 bit the parameters of layers that keep statistics.
    """
    own = sharded_parameters(places)
    statistical = {} if like.dtype == torch.float32 else _statistical_layers(places)
    in_fp32 = replace(like, dtype=torch.float32, casts_inputs=False)
    if unit in statistical:  # alone
        return [unit_of(in_fp32, [unit], own)]
    apart = set().union(*statistical.values())
    trained = trained_subunits(unit, places, apart) if like.separates_trained else {}
    apart = apart.union(*trained.values())
    units = [unit_of(like, [unit], (each for each in own if each not in apart))]
    for users, kind in ((trained, like), (statistical, in_fp32)):
        if users:
            used = set().union(*users.values())
            subunit = replace(kind, is_apart=True)
            units.append(unit_of(subunit, users, (each for each in own if each in used)))
    return units


def unit_of(
    like: UnitPlan, modules: Iterable[nn.Module], parameters: Iterable[nn.Parameter]
) -> UnitPlan:
    """Return a unit like another one, of parameters that these modules use."""
    parameters = tuple(parameters)
    specs = (_spec_of(each, like.num_shards, like.placement.frozen_bits) for each in parameters)
    return replace(like, modules=tuple(modules), parameters=parameters, specs=tuple(specs))


def cut(plans: Sequence[UnitPlan]) -> tuple[fsdp.FSDPModule, ...]:
    """Make FSDP2's units as planned, in place, each over its axis; return them in order."""
    copies: dict[DeviceMesh, DeviceMesh] = {}
    for plan in plans:
        mesh = plan.axis.group.mesh
        if plan.num_shards < mesh.size() and mesh not in copies:  # shards of one rank, averaged
            same = (
                parameter
                for each in plans
                if each.axis is plan.axis
                for parameter in each.parameters
            )
            copies[mesh] = _replicas(
                mesh, with_others=any(isinstance(each, DTensor) for each in same)
            )
    for plan in sorted(plans, key=lambda plan: plan.is_apart):  # a unit cut first hides its modules
        mesh = plan.axis.group.mesh
        fsdp.shard_unit(
            plan.modules,
            plan.parameters,
            copies.get(mesh, mesh),
            fsdp.MixedPrecisionPolicy(
                param_dtype=plan.dtype,
                reduce_dtype=torch.float32,
                cast_forward_inputs=plan.casts_inputs,
            ),
            reshard_after_forward=plan.regathers,
            on_host=plan.placement.weights is not None,
            pin_memory=plan.placement.is_pinned and mesh.device_type != "cpu",
        )
    return tuple(plan.modules[0] for plan in plans)


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


def _axis_of(mesh: DeviceMesh, data: DeviceMesh, config: ZeroConfig, num_losses: int) -> DataAxis:
    """Return the axis of units that are sharded over `data`, an axis of `mesh`."""
    group = everyone(find_nodes(mesh, config, data), data.get_local_rank(), ranks_of(data))
    return DataAxis.of(config, replace(group, mesh=data), num_losses=num_losses)


def _replicas(mesh: DeviceMesh, *, with_others: bool) -> DeviceMesh:
    """Return a mesh of shards of one rank, replicated over all ranks of a data axis.

    `with_others` keeps it a part of the mesh that the data axis is an axis of, which FSDP2 needs
    for parameters on other axes.
    """
    if with_others:
        return fsdp.replica_axes(mesh)
    alone = shared_group("alone", [dist.get_rank()], mesh.mesh.flatten().tolist())
    return DeviceMesh.from_group(
        [mesh.get_group(), alone],
        mesh.device_type,
        mesh=mesh.mesh.view(-1, 1),
        mesh_dim_names=("replica", "shard"),
    )


def _spec_of(parameter: nn.Parameter, num_shards: int, stored_bits: int | None = None) -> ShardSpec:
    """Return one rank's part of a parameter; frozen matrices become codes of `stored_bits`, if set.

    If the parameter is split over other axes too, this is a part of this rank's part of it.
    """
    shape = parameter.to_local().shape if isinstance(parameter, DTensor) else parameter.shape
    row = math.prod(shape[1:])
    rows = -(-shape[0] // num_shards)  # FSDP2 cuts the first dim, rounded up
    if fsdp.sharded_dim(parameter, num_shards):
        row, rows = row // num_shards, shape[0]
    elements = rows * row
    is_stored = stored_bits and len(shape) >= 2 and not parameter.requires_grad
    return ShardSpec(
        elements=elements,
        row=row,
        ndim=len(shape),
        trainable=parameter.requires_grad,
        packed_bytes=stored_layout(elements, stored_bits).packed_bytes if is_stored else 0,
    )
