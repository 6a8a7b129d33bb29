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

`zeropp.reduce_gradients_once` makes the gradients of stages 2 and 3 those of stage 1: more memory
for fewer bytes. At stage 3 the root then stays gathered from a step's first use of it to the last.

Source: ZeRO (Rajbhandari et al. 2020), section 5; expressed on FSDP2 as in docs/adr/0001.
"""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from zeropp import fsdp_adapter as fsdp
from zeropp.errors import InputError
from zeropp.ranks.groups import inherit_time_limit
from zeropp.settings.zero_config import ZeroConfig
from zeropp.sharding.between_passes import hold_shards_between_passes
from zeropp.sharding.checks import (
    require_dense_gradients,
    require_same_model,
    require_shardable,
)
from zeropp.sharding.cut import shard_units
from zeropp.sharding.failed_pass import FailedPasses
from zeropp.sharding.forecast import Forecast
from zeropp.sharding.grid import Grid, data_axis, find_nodes, ranks_of
from zeropp.sharding.materialize import (
    allocate_meta_tensors,
    materialize_shards,
    replace_by_meta,
)
from zeropp.sharding.recorded_tensor import not_recording
from zeropp.sharding.sharding import Sharding
from zeropp.sharding.weight_changes import WeightChanges
from zeropp.wire.collectives import GradientMean, WeightGather
from zeropp.wire.frozen_weights import quantize_frozen, stored_bytes
from zeropp.wire.gradient_use import GradientUse
from zeropp.wire.in_flight import Reductions
from zeropp.wire.link import Link, connect
from zeropp.wire.route import Route, gradient_route, weight_route
from zeropp.wire.scalar_gradients import ScalarGradients
from zeropp.wire.secondary_copies import SecondaryCopies, copies_of
from zeropp.wire.traffic import Traffic

MIB = 2**20
log = logging.getLogger("zeropp")


@not_recording()
def shard(
    model: nn.Module,
    mesh: DeviceMesh | None,
    config: ZeroConfig,
    *,
    axis: str | None = None,
    units: Iterable[nn.Module] | None = None,
    cast_forward_inputs: bool = True,
    keeps_root: bool = False,
) -> Sharding:
    """Shard `model` in place over the data-parallel ranks: `mesh`, or its axis of the name `axis`.

    Parameters may be DTensors on the other axes of `mesh`, as after tensor parallelism's
    `parallelize_module`.

    `units` are the submodules gathered one at a time, in forward order; by default the entries
    of the model's outermost `nn.ModuleList`s. Parameters stay fp32 (or as they are); compute
    runs in `config.compute_format`. Build the optimizer afterwards: it must hold the shards.
    With one rank in fp32 there is nothing to shard and the model is left as it is. A model built
    inside `zeropp.zero.Init` gets its memory here, shard by shard. `keeps_root` leaves the root
    gathered from a step's first use of it to the last, at stage 3 too: for pipelines, which compute
    other micro-batches between the forward and the backward pass of one.

    Raises InputError for a mesh of several axes without `axis` or without this rank, settings that
    are not available or do not fit the ranks, parameters that cannot be sharded, and ranks whose
    models differ.
    """
    data = None
    if mesh is not None:
        data = data_axis(mesh, axis)
        for each in range(mesh.ndim):
            inherit_time_limit(mesh.get_group(each))
        require_same_model(model, data)
    recorded_tensors = replace_by_meta(model)
    sharding = _shard(model, mesh, data, config, units, cast_forward_inputs, keeps_root)
    device = torch.device("cpu") if config.offloads_weights else _device_of(data)
    materialize_shards(recorded_tensors, sharding.group, device)
    if sharding.scalars is not None:
        sharding.scalars.move_to_device()
    fsdp.refresh_parameters(sharding.units)
    frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
    if config.stores_frozen and frozen and not any(parameter.is_meta for parameter in frozen):
        return store_frozen(sharding, config)
    return sharding


def allocate_parameters(sharding: Sharding, config: ZeroConfig, device: torch.device) -> Sharding:
    """Allocate uninitialized memory for parameters that were sharded on the meta device.

    Trained parameters are allocated where their optimizer is, frozen ones on `device`, or all on
    the host with `offload_param`. With MixZ++, frozen matrices get memory for codes only, and
    values copied into them are quantized on the way: no rank holds more than one of them
    unquantized.
    """
    frozen_device = torch.device("cpu") if config.offloads_weights else device
    on_host = config.offloads_optimizer or config.offloads_weights
    trained_device = torch.device("cpu") if on_host else device
    if config.stores_frozen:
        sharding = store_frozen(sharding, config, frozen_device)

    def device_of(parameter: torch.Tensor) -> torch.device:
        return trained_device if parameter.requires_grad else frozen_device

    allocate_meta_tensors(sharding.model, device_of)
    if sharding.scalars is not None:
        sharding.scalars.move_to_device()
    fsdp.refresh_parameters(sharding.units)
    return sharding


def store_frozen(
    sharding: Sharding, config: ZeroConfig, meta_device: torch.device | None = None
) -> Sharding:
    """Quantize the frozen weights of two and more dims in place, once (MixZ++).

    `shard` calls it if there are frozen weights that have values. Weights on the meta device get
    memory for codes on `meta_device`. Raises InputError if nothing is frozen, and for frozen
    weights on the meta device if `meta_device` is None.
    """
    bits = config.zeropp.nontrainable_weight_bits
    quantize_frozen(sharding.units, bits, meta_device)
    num_bytes, elements = stored_bytes(sharding.model)
    if all(parameter.requires_grad for parameter in sharding.model.parameters()):
        raise InputError(
            "zero_quantized_nontrainable_weights stores frozen weights quantized, but all weights "
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


def use_weight_gather(
    units: Sequence[fsdp.FSDPModule],
    mesh: DeviceMesh,
    route: Route,
    traffic: Traffic,
    copies: SecondaryCopies | None = None,
) -> None:
    """Gather the units' weights along `route`."""
    links = _connect(route, mesh, traffic, "weights")
    for unit in units:
        fsdp.use_all_gather(unit, WeightGather(unit, route, links, copies))


def use_gradient_mean(
    units: Sequence[fsdp.FSDPModule],
    mesh: DeviceMesh,
    route: Route,
    traffic: Traffic,
    wire_dtype: torch.dtype,
    use: GradientUse,
) -> None:
    """Average the units' gradients along `route`."""
    links = _connect(route, mesh, traffic, "gradients")
    in_flight = Reductions() if mesh.device_type == "cpu" else None
    for unit in units:
        mean = GradientMean(unit, route, links, wire_dtype, in_flight, use)
        fsdp.use_reduce_scatter(unit, mean, divides=True)


def outermost_blocks(module: nn.Module) -> Sequence[nn.Module]:
    """Return the entries of the outermost `nn.ModuleList`s that have parameters, in order.

    A block that is listed several times, as in models that share layers, is returned once. Lists
    of lists count as one list.
    """
    blocks: dict[nn.Module, None] = {}
    for child in module.children():
        is_block = isinstance(module, nn.ModuleList) and not isinstance(child, nn.ModuleList)
        for block in [child] if is_block else outermost_blocks(child):
            if any(True for _ in block.parameters()):
                blocks[block] = None
    return list(blocks)


def _shard(
    model: nn.Module,
    whole_mesh: DeviceMesh | None,
    mesh: DeviceMesh | None,
    config: ZeroConfig,
    units: Iterable[nn.Module] | None,
    cast_forward_inputs: bool,
    keeps_root: bool,
) -> Sharding:
    """As `shard`; `mesh` is the data axis of `whole_mesh`."""
    num_ranks = 1 if mesh is None else mesh.size()
    compute_dtype = getattr(torch, config.compute_format)
    wire_dtype = getattr(torch, config.wire_format)
    fields = {
        "model": model,
        "stage": config.stage,
        "reduces_once": config.reduces_once,
        "keeps_root": keeps_root or config.reduces_once,
        "num_ranks": num_ranks,
        "compute_dtype": compute_dtype,
        "group": mesh.get_group() if mesh else None,
        "grid": Grid(model, whole_mesh, mesh),
    }  # of the result
    require_dense_gradients(model)
    needs_engine = config.offloads_weights or config.stores_frozen
    if num_ranks == 1 and compute_dtype == torch.float32 and not needs_engine:
        return Sharding(**fields)
    _require_mesh(mesh, config)
    blocks = tuple(outermost_blocks(model) if units is None else units)
    require_shardable(model, blocks)
    nodes = find_nodes(whole_mesh, config, mesh)
    routes = weight_route(config, nodes), gradient_route(config, nodes)
    units = shard_units(model, blocks, mesh, config, cast_forward_inputs)
    position = mesh.get_local_rank()
    copies = copies_of(model, routes[0], position, config)
    fields |= _watched(model, units, mesh, config, copies)
    use = fields["gradient_use"]
    if config.stage == 0 or num_ranks == 1:
        for unit in units:
            if use is not None:
                use.add(unit)
            fsdp.before_reduction(unit, None if use is None else partial(use.note, unit))
    if num_ranks == 1:
        return Sharding(**fields)
    _order_gathers(model, units, mesh, in_turn=keeps_root)
    fields["forecast"] = _forecast(config, units, routes, fields["keeps_root"])
    if config.stage == 0:
        return Sharding(**fields)
    traffic = Traffic()
    use_weight_gather(units, mesh, routes[0], traffic, copies)
    use_gradient_mean(units, mesh, routes[1], traffic, wire_dtype, use)
    return Sharding(**fields, traffic=traffic, copies=copies)


def _watched(
    model: nn.Module,
    units: Sequence[fsdp.FSDPModule],
    mesh: DeviceMesh,
    config: ZeroConfig,
    copies: SecondaryCopies | None,
) -> dict[str, Any]:
    """Register what acts before, between and after passes; return it, as fields of `Sharding`."""
    group, device = mesh.get_group(), _device_of(mesh)
    scalars = ScalarGradients(model, group, device)
    changes = WeightChanges(model, units, copies, group if config.stage else None, scalars)
    passes = hold_shards_between_passes(model, units)
    if hasattr(model, "generate") and _is_wrapper(model):
        passes.include(model, "generate")
    use = None if mesh.size() == 1 else GradientUse(group, device)
    failed = FailedPasses(
        model, units, accumulates=config.reduces_once, use=use, copies=copies, scalars=scalars
    )
    return {
        "units": units,
        "gradient_use": use,
        "scalars": scalars,
        "weight_changes": changes,
        "failed_passes": failed,
    }


def _order_gathers(
    model: nn.Module, units: Sequence[fsdp.FSDPModule], mesh: DeviceMesh, *, in_turn: bool
) -> None:
    """Set which units are gathered while others compute; `in_turn` with passes of other batches."""
    *blocks, _ = units
    if blocks and mesh.device_type == "cpu":
        fsdp.gather_ahead(model, blocks)
    if in_turn:
        fsdp.gather_back(blocks)


def _require_mesh(mesh: DeviceMesh | None, config: ZeroConfig) -> None:
    if mesh is None:
        raise InputError(
            f"zeropp.shard needs a device mesh of the ranks for {config.compute_format} and for "
            "what is offloaded or stored quantized: init_device_mesh makes one, also of one rank"
        )


def _forecast(
    config: ZeroConfig,
    units: Sequence[fsdp.FSDPModule],
    routes: tuple[Route, Route],
    keeps_root: bool,
) -> Forecast:
    """Return the forecast of units whose weights and gradients take these routes."""
    weights, gradients = routes
    return Forecast(
        stage=config.stage,
        reduces_once=config.reduces_once,
        keeps_roots=keeps_root,
        units=tuple(fsdp.own_pieces(unit) for unit in units),
        weights=weights,
        gradients=gradients,
        compute_dtype=getattr(torch, config.compute_format),
        wire_dtype=getattr(torch, config.wire_format),
    )


def _is_wrapper(model: nn.Module) -> bool:
    """Whether a model only wraps another one, as PEFT's models do.

    Its methods may then call the inner model directly, past the hooks that gather the root's
    parameters.
    """
    return not any(True for _ in model.parameters(recurse=False)) and len([*model.children()]) == 1


def _device_of(mesh: DeviceMesh | None) -> torch.device:
    if mesh is None or mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.accelerator.current_device_index())


def _connect(
    route: Route, mesh: DeviceMesh, traffic: Traffic, purpose: str
) -> tuple[Link | None, Link | None]:
    """Connect this rank to its inner and its outer hop."""
    ranks, position = ranks_of(mesh), mesh.get_local_rank()
    hops = route.inner_hop(position), route.outer_hop(position)
    inner, outer = (connect(hop, ranks, position, traffic, purpose) for hop in hops)
    return inner, outer
