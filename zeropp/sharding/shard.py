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

Tensors that `zeropp.zero.Init` recorded get their memory one at a time, shard by shard: the first
rank materializes each and broadcasts it, and every rank keeps its shard. No rank holds more than
its shards and one whole tensor, and all ranks hold the same model.

Source: ZeRO (Rajbhandari et al. 2020), section 5; expressed on FSDP2 as in docs/adr/0001.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import MappingProxyType

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor

from zeropp.exports import modules_of
from zeropp.fsdp_adapter import inherit
from zeropp.settings.zero_config import ZeroConfig
from zeropp.sharding.checks import require_same_model, require_shardable
from zeropp.sharding.cut import cut, outermost_blocks, places_of, plan_model
from zeropp.sharding.grid import Grid, data_axis, device_of, inherit_time_limits
from zeropp.sharding.own_meshes import parts_of, replace_by_parts
from zeropp.sharding.recorded_tensor import RECORDED_ATTRIBUTES, RecordedTensor, not_recording
from zeropp.sharding.root import Root
from zeropp.sharding.sharding import Sharding

HOST = torch.device("cpu")
Owners = tuple[tuple[nn.Module, str], ...]  # modules that hold a tensor, and its name in each


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
    options = dict(casts_inputs=cast_forward_inputs, keeps_root=keeps_root, calls_units=calls_units)
    return _shard(model, mesh, config, axis, units, experts, **options)


def _shard(
    model: nn.Module,
    mesh: DeviceMesh | None,
    config: ZeroConfig,
    axis: str | None,
    units: Iterable[nn.Module] | None,
    own_meshes: Mapping[nn.Module, DeviceMesh],
    *,
    keeps_root: bool,
    **options: bool,
) -> Sharding:
    """Check that a model can be sharded, or raise InputError; plan it, and cut it as planned."""
    data = None if mesh is None else data_axis(mesh, axis)
    if mesh is not None:
        inherit_time_limits(mesh)
        require_same_model(model, data)
    group, device, roots = None if data is None else data.get_group(), device_of(data), ()
    placement = config.placement
    with recorded_as_meta(model, group, torch.device(placement.weights or device)):
        parts = parts_of(own_meshes) if own_meshes else {}
        blocks = tuple(outermost_blocks(model) if units is None else units)
        places = places_of(model, {*blocks, *own_meshes}, parts)
        known = dict(blocks=blocks, places=places, own_meshes=own_meshes)
        is_cut = require_shardable(model, data, config, **known, parts=parts)
        grid = Grid(model, mesh, data, own_meshes)
        plan = plan_model(
            model, mesh, data if is_cut else None, config, **known, keeps_root=keeps_root, **options
        )
        if parts:
            replace_by_parts(own_meshes, parts)
        if plan.units:
            cut_units = cut(plan.units)
            roots = (Root(model, plan, cut_units, config, group, device, in_turn=keeps_root),)
        freed = tuple(replace(unit, parameters=()) for unit in plan.units)
        plan, parts, places, known = replace(plan, units=freed), {}, [], {}  # free whole weights
        sharding = Sharding(model=model, plan=plan, grid=grid, roots=roots, group=group)
    sharding.refresh()
    return sharding if placement.frozen_bits is None else _stored(sharding, config)


def allocate_parameters(sharding: Sharding, config: ZeroConfig, device: torch.device) -> Sharding:
    """Allocate uninitialized memory for parameters that were sharded on the meta device.

    They are allocated on `device` or where the configuration places them: trained ones where their
    optimizer's are. Matrices that are stored as codes get memory for these only, and values copied
    into them are quantized on the way: no rank holds more than one of them unquantized.
    """
    frozen = torch.device(config.placement.weights or device)
    if config.placement.frozen_bits is not None:
        sharding = _stored(sharding, config, frozen)
    device_of = {}
    if ratio := config.placement.trained_on_cpu:
        trained = [each for each in sharding.model.parameters() if each.requires_grad]
        device_of = dict(zip(trained, master_devices(trained, ratio, device), strict=True))
    allocate_meta_tensors(sharding.model, lambda each: device_of.get(each, frozen))
    sharding.refresh()
    return sharding


def _stored(
    sharding: Sharding, config: ZeroConfig, meta_device: torch.device | None = None
) -> Sharding:
    """Return the sharding with frozen matrices as a capability stores them.

    Those on the meta device get memory on `meta_device`; without they wait until all have values.
    """
    are_meta = [each.is_meta for each in sharding.model.parameters() if not each.requires_grad]
    if meta_device is None and (not are_meta or any(are_meta)):
        return sharding
    (storage,) = modules_of("storage")
    return storage.store(sharding, config, meta_device)


@contextmanager
def recorded_as_meta(
    model: nn.Module, group: dist.ProcessGroup | None, device: torch.device
) -> Iterator[None]:
    """Replace recorded tensors by meta tensors inside; afterwards materialize them on the device.

    All ranks of `group` use it. After an exception they stay meta tensors.
    """
    owners_of = _tensors_where(model, lambda tensor: isinstance(tensor, RecordedTensor))
    replaced: dict[RecordedTensor, Owners] = {}
    for recorded, owners in owners_of.items():
        meta = torch.empty_strided(
            recorded.size(), recorded.stride(), dtype=recorded.dtype, device="meta"
        )
        replaced[_put(_as_parameter_like(recorded, meta), owners)] = owners
    yield
    for recorded, owners in replaced.items():
        whole = _broadcast_materialized(recorded, group, device)
        module, name = owners[0]
        shard = _shard_like(getattr(module, name), whole)
        _put(_as_parameter_like(recorded, shard), owners)


def allocate_meta_tensors(
    model: nn.Module, device_of: Callable[[torch.Tensor], torch.device]
) -> None:
    """Replace meta tensors by uninitialized ones on the devices that `device_of` returns."""
    for tensor, owners in _tensors_where(model, lambda tensor: tensor.is_meta).items():
        empty = torch.empty_like(tensor, device=device_of(tensor))
        _put(_as_parameter_like(tensor, empty), owners)


def master_devices(
    parameters: Sequence[nn.Parameter], ratio: float, device: torch.device
) -> Iterator[torch.device]:
    """Yield the host for parameters that fit into `ratio` of all elements, else `device`."""
    sizes = [parameter.numel() for parameter in parameters]
    left = math.ceil(ratio * sum(sizes))
    for size in sizes:
        fits = size <= left
        left -= size if fits else 0
        yield HOST if fits else device


def copy_from_first_rank(
    model: nn.Module, group: dist.ProcessGroup | None, device: torch.device
) -> None:
    """Give every rank the first rank's values of the parameters and buffers that have values."""
    if group is None or group.size() == 1:
        return
    tensors = dict.fromkeys((*model.parameters(), *model.buffers()))
    with torch.no_grad():
        for tensor in tensors:
            if not isinstance(tensor, RecordedTensor | DTensor) and not tensor.is_meta:
                sent = tensor.detach().to(device).contiguous()
                _broadcast(sent, group)
                if sent.data_ptr() != tensor.data_ptr():
                    tensor.copy_(sent)


def is_whole(tensor: DTensor) -> bool:
    """Whether every rank has all of a tensor."""
    axes = enumerate(tensor.placements)
    return all(placement.is_replicate() or tensor.device_mesh.size(n) == 1 for n, placement in axes)


def part_for_rank(whole: torch.Tensor, like: DTensor) -> torch.Tensor:
    """Return this rank's part of `whole`, sharded as `like`: a view where possible."""
    sharded = distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)
    return sharded.to_local()


def _broadcast_materialized(
    recorded: RecordedTensor, group: dist.ProcessGroup | None, device: torch.device
) -> torch.Tensor:
    """Return the tensor on every rank; only the first one replays the tape."""
    if group is None or dist.get_rank(group) == 0:
        whole = recorded.materialize().contiguous().to(device)
    else:
        whole = torch.empty(recorded.shape, dtype=recorded.dtype, device=device)
    if group is not None and group.size() > 1:
        _broadcast(whole, group)
    return whole


def _broadcast(tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
    if tensor.numel():
        dist.broadcast(tensor, src=dist.get_global_rank(group, 0), group=group)


def _shard_like(placeholder: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of `whole`, or all of it where the placeholder is not sharded."""
    if not isinstance(placeholder, DTensor):
        return whole
    return DTensor.from_local(
        part_for_rank(whole, placeholder).clone(),
        placeholder.device_mesh,
        placeholder.placements,
        run_check=False,
        shape=placeholder.shape,
        stride=placeholder.stride(),
    )


def _as_parameter_like(original: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    if not isinstance(original, nn.Parameter):
        return tensor
    parameter = nn.Parameter(tensor, requires_grad=original.requires_grad)
    inherit(parameter, original)
    for name in RECORDED_ATTRIBUTES:
        vars(parameter).pop(name, None)
    return parameter


def _put(tensor: torch.Tensor, owners: Owners) -> torch.Tensor:
    """Let modules hold a tensor in the place of another one; return what they held.

    A buffer is swapped in place, so that it stays persistent or not; for a copy, since a thread of
    the process group may still hold what it has broadcast, which torch does not swap.
    """
    module, name = owners[0]
    if isinstance(tensor, nn.Parameter):
        held = module.get_parameter(name)
        for module, name in owners:
            module.register_parameter(name, tensor)
        return held
    copy = tensor.clone()
    torch.utils.swap_tensors(module.get_buffer(name), copy)
    return copy


def _tensors_where(
    model: nn.Module, condition: Callable[[torch.Tensor], bool]
) -> dict[torch.Tensor, Owners]:
    """Return the parameters and buffers that fulfil a condition; tied ones have several owners."""
    owners: dict[torch.Tensor, Owners] = {}
    own = {"recurse": False, "remove_duplicate": False}
    for module in model.modules():
        for name, tensor in (*module.named_parameters(**own), *module.named_buffers(**own)):
            if condition(tensor):
                owners[tensor] = (*owners.get(tensor, ()), (module, name))
    return owners
