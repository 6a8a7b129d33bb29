"""Checks that a model can be sharded or attached, made before anything in it is changed.

FSDP2 reports some of these problems only in the first forward pass, and less clearly.
"""

from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from zeropp import fsdp_adapter as fsdp
from zeropp.errors import InputError
from zeropp.exports import CAPABILITIES, declared
from zeropp.quant.packing import FLOATS
from zeropp.ranks.coordination import among, require_same
from zeropp.settings.zero_config import ZeroConfig
from zeropp.sharding.cut import Place
from zeropp.sharding.own_meshes import Parts, require_apart
from zeropp.wire.collectives import WeightGather
from zeropp.wire.route import UNQUANTIZED, Route

Units = Mapping[str, fsdp.Unit]  # by name
ENGINES_KEYS = ("gradient_allreduce_op", "torch_autocast.enabled", "managed_gradient_accumulation")


def require_same_model(
    model: nn.Module, mesh: DeviceMesh, *, caller: str = "zeropp.shard", with_buffers: bool = False
) -> None:
    """Raise InputError on all ranks of `mesh` if they would shard different models.

    Buffers may differ unless one rank's are sent to all.
    """
    require_module(model, caller)
    values = parameter_values(model.named_parameters())
    if with_buffers:
        values |= {f"buffer {name}": list(each.shape) for name, each in model.named_buffers()}
    with among(mesh.get_group()):
        require_same(values, "build the same model on all ranks", caller=caller)


def require_shardable(
    model: nn.Module,
    data: DeviceMesh | None,
    config: ZeroConfig,
    *,
    blocks: Sequence[nn.Module],
    places: Sequence[Place],
    own_meshes: Mapping[nn.Module, DeviceMesh],
    parts: Parts,
) -> bool:
    """Raise InputError for what keeps a model from being sharded by units, its blocks and itself.

    own_meshes: those of modules whose parameters other ranks split and shard. parts: this rank's of
    these parameters. Returns whether it is to be sharded: one rank in fp32 leaves it as it is.
    """
    for dotted in ENGINES_KEYS:
        value, key = config.value(dotted), ZeroConfig.setting(dotted)
        if value != key.default:
            raise InputError(
                f"{key.assignment(value)} is for engines of zeropp.initialize: leave it out, and "
                "do the same in the training loop"
            )
    _require_dense_gradients(model)
    is_alone = data is None or data.size() == 1
    if is_alone and config.compute_format == "float32" and not config.always_gathers:
        return False
    if data is None:
        raise InputError(
            f"zeropp.shard needs a device mesh of the ranks for {config.compute_format} and for "
            "what is offloaded or stored quantized: init_device_mesh makes one, also of one rank"
        )
    _require_blocks(model, blocks)
    if own_meshes or config.expert_parallel.enabled:
        require_apart(own_meshes, parts, blocks, data, config)
    for place in places:
        _require_plain(place.name, place.parameter)
    owners: dict[nn.Parameter, Place] = {}
    trained: dict[nn.Module, Place] = {}
    for place in places:
        if not place.parameter.ndim:
            continue
        first = owners.setdefault(place.parameter, place)
        if place.unit is not first.unit:  # sharding would turn one weight into two
            raise InputError(
                f"{first.name} and {place.name} are one parameter in two units that are gathered "
                "apart: give zeropp.shard units= without those two, or do not share it"
            )
        if place.parameter.requires_grad:
            _require_one_type(trained.setdefault(place.unit, place), place)
    return True


def _require_dense_gradients(model: nn.Module) -> None:
    """Raise InputError for a layer whose gradients are sparse."""
    for name, module in model.named_modules():
        if getattr(module, "sparse", False) is True and module.weight.requires_grad:
            raise InputError(
                f"the {type(module).__name__} {name} has sparse gradients, which zeropp does not "
                "average: build it with sparse=False"
            )


def _require_blocks(model: nn.Module, blocks: Sequence[nn.Module]) -> None:
    """Raise InputError unless `blocks` can be the units of a model that is not sharded.

    They are modules within the model, each given once and before what contains it: a unit takes all
    parameters inside it that no earlier one has.
    """
    names = {module: name for name, module in model.named_modules()}
    for module, name in names.items():
        if isinstance(module, fsdp.FSDPModule):
            where = f"its {name}" if name else "it"
            raise InputError(
                f"the model given to zeropp.shard, {where}, is sharded already: give a new one"
            )
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


def _require_one_type(first: Place, place: Place) -> None:
    """Require one dtype per unit, because a unit's gradients are averaged in one buffer."""
    dtype, other = first.parameter.dtype, place.parameter.dtype
    if other != dtype:
        raise InputError(
            f"{first.name} is {dtype} and {place.name} {other}: the parameters of a unit that "
            "are trained must have one type; call model.float(), and let bf16.enabled or "
            "fp16.enabled choose what is computed in"
        )


def require_module(model: object, caller: str) -> None:
    """Raise InputError for what is no model."""
    if not isinstance(model, nn.Module):
        raise InputError(
            f"{caller} was given a {type(model).__name__}: give the model, a torch.nn.Module"
        )


def require_sharded(model: nn.Module, units: Units) -> None:
    """Raise InputError for a model that is not sharded, or has our collectives already."""
    if not units:
        raise InputError(
            f"zeropp.attach: this {type(model).__name__} has no unit of fully_shard. Call it after "
            "the model was sharded, or shard it by zeropp.shard, which sets the same collectives"
        )
    for name, unit in units.items():
        if isinstance(fsdp.collectives_of(unit).all_gather, WeightGather):
            raise InputError(
                f"zeropp.attach: {name or 'the model'} has ZeRO++'s collectives already, by "
                "zeropp.shard or zeropp.attach: call detach() of what that returned first"
            )


def require_attachable_settings(config: ZeroConfig) -> None:
    """Raise InputError for settings that need `zeropp.shard`, or separate steps."""
    require_common_steps(config, "zeropp.attach")
    if config.stage == 0:
        raise InputError(
            "zero_optimization.stage = 0 keeps whole weights on every rank, and zeropp.attach is "
            "for models whose weights are sharded: set 3, or 2 and 1, which here mean the same"
        )
    if config.expert_ranks > 1:
        raise InputError(
            f"expert_parallel.autoep_size = {config.expert_ranks} splits experts, and "
            "zeropp.attach leaves weights where they are: give the model to zeropp.initialize, or "
            "let transformers split its experts, by DistributedConfig(ep_size=...), and leave it "
            "out"
        )
    for key in config.placement.keys:
        raise InputError(
            f"zero_optimization.{key} changes where or how weights are stored, which "
            "zeropp.attach leaves as it is: shard the model with zeropp.shard, or leave it out"
        )


def require_common_steps(config: ZeroConfig, caller: str) -> None:
    """Raise InputError for replicas that train independently, where all ranks step together."""
    for dotted, advice in declared("INDEPENDENT_STEPS", CAPABILITIES):
        value, key = config.value(dotted), ZeroConfig.setting(dotted)
        if value != key.default:
            raise InputError(
                f"{key.assignment(value)}: all ranks of {caller} take each step together. {advice}"
            )


def obstacles(units: Units) -> dict[str, str]:
    """Return by name the units that cannot be attached, and why."""
    return {name: reason for name, unit in units.items() if (reason := _obstacle(unit))}


def gather_obstacle(unit: fsdp.Unit, route: Route) -> str | None:
    """Return why the weights of a unit cannot take this route."""
    if not route.is_flat and fsdp.has_gather_hooks(unit):
        return "its parameters say themselves what is gathered of them (fsdp_pre_all_gather)"
    dtypes = fsdp.gathered_dtypes(unit)
    if len(dtypes) > 1 and route.bits[0] != UNQUANTIZED:
        names = " and ".join(sorted(map(str, dtypes)))
        return (
            f"its weights are gathered in {names}, and only those of one type can be quantized: "
            "shard it with MixedPrecisionPolicy(param_dtype=...)"
        )
    return None


def data_group(units: Units) -> dist.ProcessGroup:
    """Return the ranks that share the units: of several groups the one that contains the others.

    Experts are sharded over some of the data ranks. Raises InputError unless one contains all.
    """
    groups = {name: fsdp.shard_group(unit) for name, unit in units.items()}
    ranks = {name: dist.get_process_group_ranks(group) for name, group in groups.items()}
    data = max(ranks, key=lambda name: len(ranks[name]))
    for name, its in ranks.items():
        if not {*its} <= {*ranks[data]}:
            raise InputError(
                f"zeropp.attach: {data or 'the model'} is sharded over the ranks {ranks[data]} and "
                f"{name or 'the model'} over {its}, which are not among these: what is sharded "
                "over fewer ranks, as experts are, must be so over some of the data ranks. Split "
                "the experts over as many ranks as tensor parallelism uses, or a multiple of that"
            )
    return groups[data]


def require_types(units: Units, wire_dtypes: Mapping[str, torch.dtype]) -> None:
    """Raise InputError for weights or gradients of a type that cannot be sent.

    `wire_dtypes` are by unit what unquantized gradients would travel in.
    """
    for name, unit in units.items():
        for what, dtypes in (
            ("gathers weights", fsdp.gathered_dtypes(unit)),
            ("reduces gradients", {wire_dtypes[name]}),
        ):
            if others := dtypes.difference(FLOATS):
                raise InputError(
                    f"zeropp.attach: {name or 'the model'} {what} in {others.pop()}, and bf16, "
                    "fp16 and fp32 can be sent: convert the model before it is sharded, as by "
                    "model.float(), or shard it with a MixedPrecisionPolicy"
                )


def parameter_values(parameters: Iterable[tuple[str, nn.Parameter]]) -> dict[str, object]:
    """Return by name what of each parameter decides what ranks send each other."""
    return {
        name: " ".join(
            (
                "uninitialized" if is_lazy(each) else str(list(each.shape)),
                str(each.dtype),
                "trained" if each.requires_grad else "frozen",
            )
        )
        for name, each in parameters
    }


def unit_values(model: nn.Module, units: Units) -> dict[str, object]:
    """Return by name what of the units and their parameters decides what ranks send each other."""
    values: dict[str, object] = {"units": [*units]}
    names = {id(each): name for name, each in model.named_parameters()}
    for name, unit in units.items():
        where = name or "the model"
        weights, gradients = fsdp.dtypes_of(unit)
        values[f"the type in which {where} gathers weights"] = weights
        values[f"the type in which {where} reduces gradients"] = gradients
        values[f"reshard_after_forward of {where}"] = fsdp.frees_after_forward(unit, model)
        values[f"number of ranks that share {where}"] = fsdp.shard_group(unit).size()
        shards = enumerate(fsdp.shards(unit))
        named = ((names.get(id(each), f"{name} parameter {i}"), each) for i, each in shards)
        values |= parameter_values(named)
    return values


def _obstacle(unit: fsdp.Unit) -> str | None:
    if fsdp.shard_group(unit) is None:
        return "it is replicated, not sharded"
    if fsdp.keeps_part_after_forward(unit):
        return "an int reshard_after_forward keeps a copy already (use zero_hpz_partition_size)"
    if not fsdp.collectives_of(unit).are_defaults:
        return "it has other collectives than FSDP2's own"
    return None
