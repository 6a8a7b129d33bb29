"""Shard any model by ZeRO stage, in place, in one call.

    sharding = zeropp.shard(model, mesh, config)
    for index, batch in enumerate(micro_batches):
        with sharding.micro_step(last=index == len(micro_batches) - 1):
            (loss(model, batch) / len(micro_batches)).backward()

| stage | parameters between uses         | gradients                                  | optimizer |
|-------|---------------------------------|--------------------------------------------|-----------|
| 0     | whole on every rank             | whole; all-reduced once per step           | whole     |
| 1     | sharded; gathered once per step | whole; reduce-scattered once per step      | sharded   |
| 2     | sharded; gathered once per step | reduce-scattered after each micro-batch    | sharded   |
| 3     | sharded; gathered for each use  | reduce-scattered after each micro-batch    | sharded   |

Source: ZeRO (Rajbhandari et al. 2020), section 5; expressed on FSDP2 as in docs/adr/0001.
"""

import logging
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from zeropp import fsdp_adapter as fsdp
from zeropp.errors import InputError
from zeropp.ranks.topology import Environment
from zeropp.settings.zero_config import ZeroConfig
from zeropp.sharding.checks import require_shardable
from zeropp.sharding.forecast import Forecast
from zeropp.sharding.materialize import fill, make_room, set_aside
from zeropp.sharding.sharding import Sharding
from zeropp.sharding.subunits import Subunits, trained_subunits
from zeropp.sharding.weight_changes import forget_when_weights_change
from zeropp.wire.collectives import GradientMean, SecondaryCopies, WeightGather
from zeropp.wire.frozen_weights import quantize_frozen, stored_bytes
from zeropp.wire.in_flight import Reductions
from zeropp.wire.link import Link, connect
from zeropp.wire.route import Nodes, Route, gradient_route, weight_route
from zeropp.wire.traffic import Traffic

MIB = 2**20
log = logging.getLogger("zeropp")


def shard(
    model: nn.Module,
    mesh: DeviceMesh | None,
    config: ZeroConfig,
    *,
    units: Iterable[nn.Module] | None = None,
    cast_forward_inputs: bool = True,
) -> Sharding:
    """Shard `model` in place over the one-axis `mesh` of data-parallel ranks.

    `units` are the submodules gathered one at a time, in forward order; by default the entries
    of the model's outermost `nn.ModuleList`s. Parameters stay fp32 (or as they are); compute
    runs in `config.compute_format`. Build the optimizer afterwards: it must hold the shards.
    With one rank in fp32 there is nothing to shard and the model is left as it is. A model built
    inside `zeropp.zero.Init` gets its memory here, shard by shard.

    Raises InputError for a mesh of more than one axis, settings that are not available or do not
    fit the ranks, and parameters that cannot be sharded.
    """
    waiting = set_aside(model)
    sharding = _shard(model, mesh, config, units, cast_forward_inputs)
    place = torch.device("cpu") if config.offloads_weights else _device_of(mesh)
    fill(waiting, sharding.group, place)
    fsdp.refresh_parameters(sharding.units)
    frozen = [one for one in model.parameters() if not one.requires_grad]
    if config.stores_frozen and frozen and not any(one.is_meta for one in frozen):
        return store_frozen(sharding, config)
    return sharding


def allocate_parameters(sharding: Sharding, config: ZeroConfig, device: torch.device) -> Sharding:
    """Memory without values for parameters that were sharded on the meta device.

    Trained ones lie where their optimizer is, frozen ones on `device`, or all on the host with
    `offload_param`. With MixZ++ frozen matrices have memory for codes only, and what is copied into
    them is quantized on its way: no rank holds more than one of them as numbers.
    """
    home = torch.device("cpu") if config.offloads_weights else device
    trained = torch.device("cpu") if config.offloads_optimizer else device
    if config.stores_frozen:
        sharding = store_frozen(sharding, config, home)
    make_room(sharding.model, lambda one: trained if one.requires_grad else home)
    fsdp.refresh_parameters(sharding.units)
    return sharding


def store_frozen(
    sharding: Sharding, config: ZeroConfig, room: torch.device | None = None
) -> Sharding:
    """Quantize the frozen weights of two and more dims where they lie, once (MixZ++).

    `shard` does so by itself where there are frozen weights with values. Those without get memory
    for codes on the device `room`. Raises InputError where nothing is frozen, and for frozen
    weights without values where there is no `room`.
    """
    bits = config.zeropp.nontrainable_weight_bits
    quantize_frozen(sharding.units, bits, room)
    num_bytes, elements = stored_bytes(sharding.model)
    if all(one.requires_grad for one in sharding.model.parameters()):
        raise InputError(
            "zero_quantized_nontrainable_weights stores frozen weights quantized, and all weights "
            "are trained: freeze some (requires_grad_(False)), as LoRA does, or leave it out"
        )
    sharding.weights_changed()
    log.info(
        "MixZ++: %s frozen weights of this rank are stored as INT%d, %.1f MiB (%.1f in bf16)",
        f"{elements:,}", bits, num_bytes / MIB, 2 * elements / MIB,
    )  # fmt: skip
    forecast = sharding.forecast
    if forecast is not None:
        pieces = tuple(fsdp.own_pieces(unit) for unit in sharding.units)
        forecast = replace(forecast, units=pieces)
    return replace(sharding, forecast=forecast, stores_frozen=True)


def find_nodes(mesh: DeviceMesh, config: ZeroConfig) -> Nodes:
    """Which ranks of the mesh share a node: by `zeropp.ranks_per_node`, or as launched.

    Raises InputError on every rank where the nodes hold different numbers of ranks.
    """
    given = config.zeropp.ranks_per_node
    per_node = given or min(Environment.read().local_world_size, dist.get_world_size())
    extremes = torch.tensor([per_node, -per_node], device=mesh.device_type)
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=mesh.get_group())
    most, least = extremes[0].item(), -extremes[1].item()
    if most != least:
        raise InputError(
            f"nodes have different numbers of ranks, {least} to {most}: start the same number on "
            "every node, or set zeropp.ranks_per_node to one that divides them all"
        )
    return Nodes.of(mesh.mesh.flatten().tolist(), per_node)


def use_weight_gather(
    units: Sequence[fsdp.FSDPModule],
    mesh: DeviceMesh,
    route: Route,
    traffic: Traffic,
    copies: SecondaryCopies | None = None,
) -> None:
    """Gather the units' weights by `route`, over process groups of their own."""
    links = _connect(route, mesh, traffic)
    for unit in units:
        fsdp.use_all_gather(unit, WeightGather(unit, route, links, copies))


def use_gradient_mean(
    units: Sequence[fsdp.FSDPModule],
    mesh: DeviceMesh,
    route: Route,
    traffic: Traffic,
    wire_dtype: torch.dtype,
) -> None:
    """Average the units' gradients by `route`, over process groups of their own.

    Gathering and averaging overlap: on one communicator they would wait for each other.
    """
    links = _connect(route, mesh, traffic)
    in_flight = Reductions() if mesh.device_type == "cpu" else None
    for unit in units:
        fsdp.use_reduce_scatter(unit, GradientMean(unit, route, links, wire_dtype, in_flight))


def outermost_blocks(module: nn.Module) -> Sequence[nn.Module]:
    """The entries of the outermost `nn.ModuleList`s that hold parameters, in definition order.

    One that is entered several times, as where layers share their weights, counts once.
    """
    found: dict[nn.Module, None] = {}
    for child in module.children():
        inside = child if isinstance(child, nn.ModuleList) else outermost_blocks(child)
        found |= dict.fromkeys(one for one in inside if any(True for _ in one.parameters()))
    return list(found)


def _shard(
    model: nn.Module,
    mesh: DeviceMesh | None,
    config: ZeroConfig,
    units: Iterable[nn.Module] | None,
    cast_forward_inputs: bool,
) -> Sharding:
    num_ranks = 1 if mesh is None else mesh.size()
    compute_dtype = getattr(torch, config.compute_format)
    wire_dtype = getattr(torch, config.wire_format)
    facts = {
        "model": model, "stage": config.stage, "num_ranks": num_ranks,
        "compute_dtype": compute_dtype,
    }
    needs_engine = config.offloads_weights or config.stores_frozen
    if num_ranks == 1 and compute_dtype == torch.float32 and not needs_engine:
        return Sharding(**facts)
    if mesh is None or mesh.ndim != 1:
        raise InputError(f"zeropp.shard needs a device mesh of one axis (the data axis): {mesh}")
    blocks = tuple(outermost_blocks(model) if units is None else units)
    require_shardable(model, blocks)
    nodes = find_nodes(mesh, config)
    routes = weight_route(config, nodes), gradient_route(config, nodes)
    units = _shard_units(model, blocks, mesh, config, cast_forward_inputs)
    facts |= {"units": units, "group": mesh.get_group()}
    copies = None
    if routes[0].keeps:
        copies = SecondaryCopies(in_evaluation=config.zeropp.secondary_in_evaluation)
    forget_when_weights_change(model, units, copies)
    if hasattr(model, "generate") and _is_wrapper(model):
        register_fsdp_forward_method(model, "generate")
    if num_ranks == 1:
        return Sharding(**facts)
    if blocks and mesh.device_type == "cpu":
        fsdp.gather_ahead(model, units[:-1])
    facts["forecast"] = Forecast(
        stage=config.stage,
        units=tuple(fsdp.own_pieces(unit) for unit in units),
        weights=routes[0],
        gradients=routes[1],
        compute_dtype=compute_dtype,
        wire_dtype=wire_dtype,
    )
    if config.stage == 0:
        return Sharding(**facts)
    traffic = Traffic()
    use_weight_gather(units, mesh, routes[0], traffic, copies)
    use_gradient_mean(units, mesh, routes[1], traffic, wire_dtype)
    return Sharding(**facts, traffic=traffic, copies=copies)


def _is_wrapper(model: nn.Module) -> bool:
    """Whether all of a model is one other inside it, as in PEFT's: what is asked of it may reach
    the inner one without a call of the outer, with which the root's parameters are gathered."""
    return not any(True for _ in model.parameters(recurse=False)) and len([*model.children()]) == 1


def _shard_units(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    mesh: DeviceMesh,
    config: ZeroConfig,
    cast_forward_inputs: bool,
) -> tuple[fsdp.FSDPModule, ...]:
    """The units, in forward order, the root last."""
    stage, ranks = config.zero_optimization.stage, mesh.size()
    if stage == 0 and ranks > 1:  # replicas: shards of one rank, averaged over all
        mesh = DeviceMesh(
            mesh.device_type, mesh.mesh.view(-1, 1), mesh_dim_names=("replica", "shard")
        )
    policy, place = precision(config, cast_forward_inputs), _place(mesh, config)
    regather = stage == 3 and (ranks > 1 or config.offloads_weights or config.stores_frozen)
    options = {"mesh": mesh, "precision": policy, "place": place}
    units = []
    for block in blocks:
        units += _shard_unit(block, (), config, reshard_after_forward=regather, **options)
    # The root's own parameters are used first in forward and last in backward or, as with a tied
    # head, at both ends: they stay gathered from its forward to its backward.
    inside = {one for block in blocks for one in block.modules()}
    root, *apart = _shard_unit(model, inside, config, reshard_after_forward=False, **options)
    return (*units, *apart, root)


def _shard_unit(
    unit: nn.Module, others: Collection[nn.Module], config: ZeroConfig, **options: Any
) -> list[fsdp.FSDPModule]:
    """The unit, and under MixZ++ one more of what is trained beside frozen weights in it."""
    apart = trained_subunits(unit, others) if config.stores_frozen else {}
    fsdp.shard_unit(unit, ignored=set().union(*apart.values()), **options)
    return [unit, *shard_subunits(apart, **options)]


def shard_subunits(apart: Subunits, **options: Any) -> list[fsdp.FSDPModule]:
    """One unit of parameters that a sharded unit has left out, where modules inside it use them."""
    if not apart:
        return []
    parts = list(apart)
    sharded = [one for part in parts for one in part.parameters() if isinstance(one, DTensor)]
    fsdp.shard_unit(parts, ignored=sharded, **options)
    return parts[:1]


def precision(config: ZeroConfig, cast_forward_inputs: bool) -> fsdp.MixedPrecisionPolicy:
    """Computes in the configured format; gradients accumulate in fp32, whatever the wire has."""
    return fsdp.MixedPrecisionPolicy(
        param_dtype=getattr(torch, config.compute_format),
        reduce_dtype=torch.float32,
        cast_forward_inputs=cast_forward_inputs,
    )


def _place(mesh: DeviceMesh, config: ZeroConfig) -> fsdp.OffloadPolicy:
    if not config.offloads_weights:
        return fsdp.ON_DEVICE
    pinned = config.zero_optimization.offload_param.pin_memory
    return fsdp.CPUOffloadPolicy(pin_memory=pinned and mesh.device_type != "cpu")


def _device_of(mesh: DeviceMesh | None) -> torch.device:
    if mesh is None or mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.accelerator.current_device_index())


def _connect(
    route: Route, mesh: DeviceMesh, traffic: Traffic
) -> tuple[Link | None, Link | None]:
    """This rank's inner and outer link."""
    ranks, position = tuple(mesh.mesh.flatten().tolist()), mesh.get_local_rank()
    hops = route.inner_hop(position), route.outer_hop(position)
    inner, outer = (connect(hop, ranks, position, traffic) for hop in hops)
    return inner, outer
