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
from collections.abc import Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from zeropp.errors import InputError
from zeropp.settings.zero_config import ZeroConfig
from zeropp.sharding.checks import require_own_meshes, require_same_model, require_shardable
from zeropp.sharding.cut import cut, parts_of, plan_model, replace_by_parts
from zeropp.sharding.grid import Grid, data_axis, device_of, inherit_time_limits
from zeropp.sharding.materialize import (
    allocate_meta_tensors,
    materialize_shards,
    replace_by_meta,
)
from zeropp.sharding.places import outermost_blocks, places_of
from zeropp.sharding.recorded_tensor import not_recording
from zeropp.sharding.root import Root
from zeropp.sharding.sharding import Sharding
from zeropp.wire.frozen_weights import quantize_frozen, stored_bytes

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
    experts: Mapping[nn.Module, DeviceMesh] = MappingProxyType({}),
    cast_forward_inputs: bool = True,
    keeps_root: bool = False,
    calls_units: bool = False,
) -> Sharding:
    """Shard `model` in place over the data-parallel ranks, as `config` says; all ranks call it.

    Parameters keep their type; compute runs in `config.compute_format`. Build the optimizer
    afterwards: it must hold the shards. One rank in fp32 leaves the model as it is.

    Args:
        model: The same on all ranks. Parameters may be DTensors on the other axes of `mesh`, as
            after `parallelize_module`; of `zeropp.zero.Init` they get their memory here.
        mesh: The data-parallel ranks, or a mesh with an axis of them; None for one rank.
        config: ZeRO stage, quantization and formats.
        axis: Name of the data-parallel axis of a mesh of several.
        units: What is gathered at a time, in order; by default entries of outer `nn.ModuleList`s.
        experts: Modules inside units, with a mesh of two axes each. Their parameters are split over
            its last axis, as DTensors or by this call in the first dim, and sharded over its first.
        cast_forward_inputs: Whether units cast their floating-point inputs to the compute format.
        keeps_root: Whether the root stays gathered throughout a step, as pipelines need it.
        calls_units: Whether the model uses its units only by calling them; else other uses are
            found in each forward pass.

    Returns:
        What the steps of training need: micro-steps, the ledger of bytes, notices of changes.

    Raises:
        InputError: For several axes without `axis`, a mesh without this rank, no mesh where one is
            needed, settings that do not fit the ranks, units or experts that are not in the model,
            parameters that cannot be sharded, and ranks whose models differ.

    Example:
        ```python
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))  # "cuda" on GPUs
        config = zeropp.ZeroConfig.from_json({"zero_optimization": {"stage": 3}})
        sharding = zeropp.shard(model, mesh, config)
        optimizer = zeropp.FusedAdam(model.parameters(), lr=1e-3)
        ```
    """
    plans = dict(casts_inputs=cast_forward_inputs, keeps_root=keeps_root, calls_units=calls_units)
    return _shard(model, mesh, config, axis, units, experts, **plans)


def _shard(
    model: nn.Module,
    mesh: DeviceMesh | None,
    config: ZeroConfig,
    axis: str | None,
    units: Iterable[nn.Module] | None,
    own_meshes: Mapping[nn.Module, DeviceMesh],
    *,
    keeps_root: bool,
    **plans: bool,
) -> Sharding:
    """Check that a model can be sharded, plan it, cut it as planned, and let it have memory."""
    data = None if mesh is None else data_axis(mesh, axis)
    if mesh is not None:
        inherit_time_limits(mesh)
        require_same_model(model, data)
    recorded_tensors = replace_by_meta(model)
    require_own_meshes(own_meshes)
    parts, blocks = parts_of(own_meshes), tuple(outermost_blocks(model) if units is None else units)
    places = places_of(model, {*blocks, *own_meshes}, parts)
    known = dict(blocks=blocks, places=places, own_meshes=own_meshes)
    is_cut = require_shardable(model, data, config, **known, parts=parts)
    grid = Grid(model, mesh, data, own_meshes)
    plan = plan_model(
        model, mesh, data if is_cut else None, config, **known, keeps_root=keeps_root, **plans
    )
    replace_by_parts(own_meshes, parts)
    group, device, roots = None if data is None else data.get_group(), device_of(data), ()
    if plan.units:
        cut_units = cut(plan.units)
        roots = (Root(model, plan, cut_units, config, group, device, in_turn=keeps_root),)
    plan, parts, places, known = plan.without_parameters(), {}, [], {}
    sharding = Sharding(model=model, plan=plan, grid=grid, roots=roots, group=group)
    materialize_shards(recorded_tensors, group, torch.device(config.placement.weights or device))
    sharding.refresh()
    return _store_frozen_values(sharding, config) if config.stores_frozen else sharding


def allocate_parameters(sharding: Sharding, config: ZeroConfig, device: torch.device) -> Sharding:
    """Allocate uninitialized memory for parameters that were sharded on the meta device.

    They are allocated on `device` or where the configuration places them: trained ones where their
    optimizer is. With MixZ++, frozen matrices get memory for codes only, and
    values copied into them are quantized on the way: no rank holds more than one of them
    unquantized.
    """
    frozen = torch.device(config.placement.weights or device)
    trained = torch.device(config.placement.trained or device)
    if config.stores_frozen:
        sharding = store_frozen(sharding, config, frozen)
    allocate_meta_tensors(sharding.model, lambda each: trained if each.requires_grad else frozen)
    sharding.refresh()
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
        f"MixZ++: {elements:,} frozen weights of this rank are stored as INT{bits}, "
        f"{num_bytes / MIB:.1f} MiB ({2 * elements / MIB:.1f} in bf16)"
    )
    return replace(sharding, plan=sharding.plan.with_specs_of(sharding.units))


def _store_frozen_values(sharding: Sharding, config: ZeroConfig) -> Sharding:
    """Quantize frozen weights, if all of them have values."""
    frozen = [each for each in sharding.model.parameters() if not each.requires_grad]
    have_values = bool(frozen) and not any(parameter.is_meta for parameter in frozen)
    return store_frozen(sharding, config) if have_values else sharding
