"""Units of FSDP2: made, asked for their parameters, and connected to our collectives."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
    DefaultAllGather,
    DefaultReduceScatter,
)
from torch.distributed.fsdp._fully_shard._fsdp_common import DDPMeshInfo
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as ShardPlacement

from zeropp.fsdp_adapter.gathered import keep_shard_of_whole
from zeropp.fsdp_adapter.parameters import (
    Unit,
    groups_of,
    groups_of_state,
    inherit,
    inherit_when_gathered,
    parameters_of,
)
from zeropp.fsdp_adapter.passes import backward_id

# How many gathers are issued ahead of a unit's forward. With one, the links between nodes would be
# idle during its second hop. Each costs the memory of one more gathered unit.
AHEAD = 2


@dataclass(frozen=True, kw_only=True)
class ShardSpec:
    """One parameter's part of its unit's buffers: `elements` of one rank's padded shard.

    row: elements of it with the same first index, as the vector of a token in an embedding.
    packed_bytes: its size on the wire if it is stored quantized; 0 if it is stored as numbers.
    """

    elements: int
    row: int
    ndim: int
    trainable: bool
    packed_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class Shard:
    """One parameter of a unit, and this rank's part of it."""

    spec: ShardSpec
    local: torch.Tensor
    parameter: FSDPParam


@dataclass(frozen=True, kw_only=True)
class UnitCollectives:
    """A unit's collectives, and whether FSDP2 has them sum instead of averaging."""

    all_gather: AllGather
    reduce_scatter: ReduceScatter
    sums: bool

    @property
    def are_defaults(self) -> bool:
        """Whether they are those that FSDP2 begins with."""
        kinds = type(self.all_gather), type(self.reduce_scatter)
        return kinds == (DefaultAllGather, DefaultReduceScatter)


def shard_unit(
    modules: Sequence[nn.Module],
    parameters: Sequence[nn.Parameter],
    mesh: DeviceMesh,
    precision: MixedPrecisionPolicy,
    *,
    reshard_after_forward: bool,
    on_host: bool = False,
    pin_memory: bool = False,
) -> None:
    """Make modules an FSDP unit in place: one gather before its forward, one reduction after.

    It has these `parameters` of the modules, whose attributes and gradient hooks are kept. Its
    collectives are set on the first module. FSDP2 keeps the shards on the device or `on_host`.
    """
    owners = {owner for module in modules for owner in module.modules()}
    originals = {owner: dict(owner.named_parameters(recurse=False)) for owner in owners}
    others = {each for held in originals.values() for each in held.values()}.difference(parameters)
    fully_shard(
        [*modules],
        mesh=mesh,
        mp_policy=precision,
        offload_policy=CPUOffloadPolicy(pin_memory=pin_memory) if on_host else OffloadPolicy(),
        reshard_after_forward=reshard_after_forward,
        shard_placement_fn=partial(_placement, num_ranks=mesh.size(mesh.ndim - 1)),
        ignored_params=others,
    )
    for parameter in parameters_of(modules[0]):
        info = parameter._module_info
        inherit(parameter.sharded_param, originals[info.module][info.param_name])
        inherit_when_gathered(parameter)
        keep_shard_of_whole(parameter)


def sharded_dim(parameter: torch.Tensor, num_ranks: int) -> int:
    """Return the dim in which a parameter is cut into parts for `num_ranks`.

    It is the first one. A parameter that is split in it over another axis may have
    fewer rows left than there are ranks: padding would multiply what is gathered, so it is cut in
    its second dim where that is divided evenly and the first one is not.
    """
    if not isinstance(parameter, DTensor):
        return 0
    rows, *others = parameter.to_local().shape
    is_uneven = rows % num_ranks and parameter.ndim > 1
    return int(bool(is_uneven) and others[0] % num_ranks == 0)


def _placement(parameter: nn.Parameter, num_ranks: int) -> ShardPlacement | None:
    dim = sharded_dim(parameter, num_ranks)
    return ShardPlacement(dim) if dim else None


def replica_axes(mesh: DeviceMesh) -> DeviceMesh:
    """Return an axis as two of the same mesh: replicas over all its ranks, shards over none."""
    return mesh._unflatten(0, (mesh.size(), 1), ("replica", "shard"))


def replica_group(unit: Unit) -> dist.ProcessGroup | None:
    """Return the ranks over which FSDP2 sums a unit's shards of gradients, as with HSDP."""
    mesh = groups_of(unit)[0].mesh_info
    return mesh.replicate_process_group if isinstance(mesh, DDPMeshInfo) else None


def device_of(unit: Unit) -> torch.device:
    """Return where a unit is computed."""
    return groups_of(unit)[0].device


def collectives_of(unit: Unit) -> UnitCollectives:
    """Return the collectives of a unit."""
    group = groups_of(unit)[0]
    return UnitCollectives(
        all_gather=group._all_gather_comm,
        reduce_scatter=group._reduce_scatter_comm,
        sums=group.force_sum_reduction_for_comms,
    )


def restore_collectives(unit: Unit, collectives: UnitCollectives) -> None:
    """Set the collectives of a unit to what they were."""
    for group in groups_of(unit):
        group._all_gather_comm = collectives.all_gather
        group._reduce_scatter_comm = collectives.reduce_scatter
        group.force_sum_reduction_for_comms = collectives.sums


def use_all_gather(unit: Unit, comm: AllGather) -> None:
    """Use `comm` to gather the unit's weights.

    `set_custom_all_gather` refuses units of several parameter groups.
    """
    for group in groups_of(unit):
        group._all_gather_comm = comm


def use_reduce_scatter(unit: Unit, comm: ReduceScatter, *, divides: bool) -> None:
    """Use `comm` to reduce the unit's gradients: it is called with the op SUM.

    With `divides`, `comm` averages them; otherwise FSDP2 divides afterwards.
    """
    for group in groups_of(unit):
        group._reduce_scatter_comm = comm
        group.force_sum_reduction_for_comms = True
        if divides:
            group.gradient_divide_factor = 1.0


def gather_ahead(root: FSDPModule, blocks: Sequence[FSDPModule]) -> None:
    """Issue each unit's gather while the `AHEAD` units before it compute.

    Without streams (on CPUs) gathers overlap only if they are asynchronous and prefetched. Where a
    backward pass runs units forward again, to recompute activations, those after them have had
    their backward pass, and are not gathered.
    """
    root._set_unshard_async_op(True)
    units = (root, *blocks)
    for index, unit in enumerate(blocks):
        units[index].set_modules_to_forward_prefetch([unit, *blocks[index + 1 : index + AHEAD]])
        state = units[index]._get_fsdp_state()
        state._states_to_forward_prefetch = _InForward(state._states_to_forward_prefetch)


class _InForward(list):
    """The states of units to gather ahead: none while a backward pass runs, nor gathered ones."""

    def __iter__(self) -> Iterator:
        states = super().__iter__() if backward_id() == -1 else ()
        return (each for each in states if not all(g.is_unsharded for g in groups_of_state(each)))


def gather_in_turn(root: FSDPModule, blocks: Sequence[FSDPModule]) -> None:
    """Undo `gather_ahead`."""
    root._set_unshard_async_op(False)
    for unit in (root, *blocks):
        unit.set_modules_to_forward_prefetch([])


def gather_back(blocks: Sequence[FSDPModule]) -> None:
    """In backward, issue each block's gather while the block after it computes.

    After several forward passes FSDP2 takes the last block of an earlier pass to be the one before
    the first.
    """
    for index, block in enumerate(blocks):
        block.set_modules_to_backward_prefetch([blocks[max(0, index - 1)]])


def own_specs(unit: Unit) -> tuple[ShardSpec, ...]:
    """Return the unit's own parameters, not those of units inside it, in buffer order."""
    return tuple(map(_spec, parameters_of(unit)))


def own_shards(unit: FSDPModule) -> tuple[Shard, ...]:
    """Return the unit's own parameters in buffer order. Must not be called during a pass."""
    for group in groups_of(unit):
        group.reshard()
    return tuple(
        Shard(
            spec=_spec(parameter),
            local=parameter.sharded_param._local_tensor,
            parameter=parameter,
        )
        for parameter in parameters_of(unit)
    )


def refresh_parameters(units: Iterable[FSDPModule]) -> None:
    """Make FSDP2 use the parameters that the modules hold now."""
    for unit in units:
        for parameter in parameters_of(unit):
            parameter.reset_sharded_param()


def store(shard: Shard, stored: torch.Tensor) -> None:
    """Replace this rank's part by `stored`, a tensor that has FSDP2's all-gather hooks.

    Previously gathered values are dropped. FSDP2 looks for the hooks only when it shards, so its
    extensions are initialized again. `stored.packed` is the storage that FSDP2 compares with its
    own.
    """
    parameter, old = shard.parameter, shard.parameter.sharded_param
    if old.is_meta:  # a tensor's device cannot be changed in place
        sharded = shard_like(old, stored)
        parameter.sharded_param = nn.Parameter(sharded, requires_grad=old.requires_grad)
        inherit(parameter.sharded_param, old)
        parameter._setattr_on_modules(parameter.sharded_param)
    else:
        old._local_tensor = stored
    parameter._sharded_param_data = stored.packed
    parameter._init_extensions()
    parameter.all_gather_outputs = []
    if hasattr(parameter, "_unsharded_param"):
        del parameter._unsharded_param


def gather_input(unit: Unit) -> torch.Tensor:
    """Return what FSDP2 would gather of a unit that is not gathered: this rank's shard (C,)."""
    inputs = (each for parameter in parameters_of(unit) for each in parameter.all_gather_inputs)
    return torch.cat([*inputs])


def is_trainable(unit: Unit) -> bool:
    """Whether any of the unit's own parameters requires gradients."""
    return any(parameter.sharded_param.requires_grad for parameter in parameters_of(unit))


def has_run(unit: FSDPModule) -> bool:
    """Whether the unit has been used, so that its parameters' dtypes are fixed."""
    return any(group._reset_sharded_params for group in groups_of(unit))


def is_on_host(unit: FSDPModule) -> bool:
    """Whether FSDP2 keeps the unit's shards on the host and copies them for each gather."""
    return any(parameter.offload_to_cpu for parameter in parameters_of(unit))


def shard_like(parameter: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """Return a tensor sharded as `parameter`, if it is, with this rank's part `local`."""
    if not isinstance(parameter, DTensor):
        return local
    return DTensor(local, parameter._spec, requires_grad=False)


def name_of(unit: Unit) -> str:
    """Return the unit's name in its root module, after the first forward pass."""
    return next((group._module_fqn for group in groups_of(unit)), "") or "the root"


def shards(unit: Unit) -> list[nn.Parameter]:
    """Return the unit's parameters, as shards, in the order of `own_specs`."""
    return [parameter.sharded_param for parameter in parameters_of(unit)]


def shard_of(unit: FSDPModule, parameter: torch.Tensor) -> nn.Parameter | None:
    """Return the shard of a parameter of the unit, given as that or as gathered for a pass."""
    for each in parameters_of(unit):
        if parameter is each.sharded_param or parameter is getattr(each, "_unsharded_param", None):
            return each.sharded_param
    return None


def _spec(parameter: FSDPParam) -> ShardSpec:
    is_packed = hasattr(parameter.sharded_param._local_tensor, "fsdp_pre_all_gather")
    return ShardSpec(
        elements=parameter.padded_sharded_param_size.numel(),
        row=math.prod(parameter.padded_sharded_param_size[1:]),
        ndim=len(parameter._orig_size),
        trainable=parameter.sharded_param.requires_grad,
        packed_bytes=parameter._sharded_param_data.nbytes if is_packed else 0,
    )
