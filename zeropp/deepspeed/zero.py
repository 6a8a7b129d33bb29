"""`zeropp.zero`: the two context managers of DeepSpeed's ZeRO-3, for FSDP2's shards.

with zeropp.zero.Init():
    model = Net()                                   # allocates nothing, whatever its size
engine, *_ = zeropp.initialize(model=model, config=...)

with zeropp.zero.GatheredParameters(model.head.weight, modifier_rank=0):
    if engine.global_rank == 0:
        torch.nn.init.zeros_(model.head.weight)     # full here, written back to the shards
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from zeropp import fsdp_adapter as fsdp
from zeropp.deepspeed.comm import init_distributed
from zeropp.deepspeed.names import attribute_of
from zeropp.deepspeed.parameter_values import available, found, marking_recorded
from zeropp.errors import InputError
from zeropp.fsdp_adapter import local_part
from zeropp.ranks.coordination import world_size
from zeropp.ranks.meeting import come, raising_together
from zeropp.ranks.process_group import pick_device
from zeropp.ranks.topology import Environment
from zeropp.settings.zero_config import ZeroConfig
from zeropp.sharding.recorded_tensor import RecordedTensor, not_recording, recording
from zeropp.sharding.root import Root
from zeropp.sharding.shard import is_whole, part_for_rank
from zeropp.wire.gradients import ScalarGradients
from zeropp.wire.kept_weights import KeptWeights
from zeropp.wire.shard_holders import holders, notify_written

_UNSUPPORTED = {
    "module": "build the model inside the context, or give the finished one to zeropp.initialize",
    "data_parallel_group": "the ranks are known when zeropp.initialize or zeropp.shard is called",
    "remote_device": "the JSON's offload_param says where shards live",
    "pin_memory": "the JSON's offload_optimizer and offload_param have a pin_memory each",
    "dtype": "the shards are fp32 and computed with in the JSON's format",
    "mpu": "ranks are in meshes (mesh_param)",
}


@contextmanager
def Init(  # noqa: N802  (DeepSpeed's name)
    module: nn.Module | None = None,
    *,
    enabled: bool = True,
    config_dict_or_path: Mapping | Path | str | None = None,
    config: Mapping | Path | str | None = None,
    mem_efficient_linear: bool = True,
    **others: Any,
) -> Iterator[None]:
    """Build a model without allocating it; `zeropp.initialize` and `zeropp.shard` do that.

    This process joins the default process group, if it has joined none yet. `mem_efficient_linear`
    is accepted: PyTorch's own linear layer is used.

    The initialization of parameters is recorded and replayed later, one parameter at a time, on the
    first rank, with the same random numbers; each rank keeps only its shard. Raises InputError for
    unsupported arguments, and for code that reads a value that does not exist yet.
    """
    for name, value in {"module": module, **others}.items():
        if name not in _UNSUPPORTED:
            raise InputError(f"zeropp.zero.Init has no argument {name}")
        if value not in (None, False):
            raise InputError(f"zeropp.zero.Init({name}={value!r:.60}): {_UNSUPPORTED[name]}")
    source = config if config is not None else config_dict_or_path
    if source is not None:
        ZeroConfig.from_json(source)  # only checked
    if not enabled:
        yield
        return
    init_distributed()
    with recording(), marking_recorded():
        yield


@contextmanager
def GatheredParameters(  # noqa: N802  (DeepSpeed's name)
    params: torch.Tensor | Iterable[torch.Tensor | None] | None,
    modifier_rank: int | None = None,
    fwd_module: nn.Module | None = None,
    enabled: bool = True,
) -> Iterator[None]:
    """Gather sharded parameters in place on every rank; all ranks must enter it.

    With `modifier_rank`, that rank's changes are sent to all ranks and written back to the shards;
    otherwise changes are discarded. Parameters of models that are not sharded are left alone, and
    None, for a bias that a layer lacks, is left out.
    Inside, states may be loaded and forward passes run, on one rank alone where they use gathered
    parameters only; backward passes may not. `fwd_module` is accepted and ignored.

    Raises InputError for a rank that does not exist, for arguments that are not tensors and between
    a forward pass and its backward pass. With `modifier_rank`, an exception inside is raised on the
    other ranks too, and all parameters stay as they were.
    """
    given = [params] if params is None or isinstance(params, torch.Tensor) else params
    parameters = [each for each in given if each is not None]
    for parameter in parameters:
        if not isinstance(parameter, torch.Tensor):
            kind = type(parameter).__name__
            raise InputError(f"GatheredParameters takes parameters, not {kind}")
    parameters = [*dict.fromkeys(map(fsdp.shard_behind, parameters))]  # inside a forward pass
    sharded = [each for each in parameters if isinstance(each, DTensor)]
    others = [each for each in parameters if not isinstance(each, DTensor)]
    plain = [each for each in others if isinstance(each, nn.Parameter)]
    recorded = [each for each in others if isinstance(each, RecordedTensor)]
    scalars = [each for each in plain if not each.ndim]
    shards_of = _shards_of_whole(each for each in plain if each.ndim)
    meshed = [*sharded, *shards_of.values()]
    _require_rank(modifier_rank, meshed)
    if not enabled:
        yield
        return
    _require_shards([each for each in plain if each not in shards_of])
    _send_recorded((each for each in recorded if each.is_first_ranks), 0)
    with ExitStack() as agreement:
        for group in dict.fromkeys(group for each in meshed for group in _groups_of(each)):
            if modifier_rank is not None:
                agreement.enter_context(raising_together(group, "GatheredParameters"))
            else:
                come(group, "GatheredParameters")
        wholes = [fsdp.WholeParameter.of(parameter) for parameter in sharded]
        before = [scalar.detach().clone() for scalar in scalars]
        with available((*wholes, *others)), _in_place_of(sharded, wholes):
            yield
    if modifier_rank is not None:
        _write_back([*wholes, *shards_of], meshed, modifier_rank)
        for each in holders(ScalarGradients):
            each.send(modifier_rank, scalars)
        if sharded or scalars:
            notify_written([*sharded, *scalars])
        _note_recorded(recorded, modifier_rank)
    elif meshed:
        for scalar, value in zip(scalars, before, strict=True):
            scalar.data.copy_(value)


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Accept that a module uses a parameter of another one, which needs no registration here.

    Whatever uses it, the unit that has it is gathered then. Raises InputError for other arguments.
    """
    if not isinstance(module, nn.Module) or not isinstance(parameter, nn.Parameter):
        kinds = f"{type(module).__name__} and {type(parameter).__name__}"
        raise InputError(f"register_external_parameter takes a module and a parameter, not {kinds}")


def unregister_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Undo `register_external_parameter`, with the same arguments."""
    register_external_parameter(module, parameter)


def _note_recorded(recorded: Iterable[RecordedTensor], source: int) -> None:
    """Give all ranks what `source` wrote; what the first rank did, when it is gathered again."""
    if source:
        _send_recorded(recorded, source)
    for each in recorded:
        each.is_first_ranks = not source


def _send_recorded(recorded: Iterable[RecordedTensor], source: int) -> None:
    """Give all ranks what the rank `source` wrote before sharding."""
    device = pick_device(Environment.read())
    with not_recording(), torch.no_grad():
        for each in recorded:
            values = torch.empty(each.shape, dtype=each.dtype, device=device)
            if dist.get_rank() == source:
                values.copy_(each.materialize())
            dist.broadcast(values, source)
            if dist.get_rank() != source:
                each.copy_(values.cpu())
            each.is_first_ranks = False


def _shards_of_whole(parameters: Iterable[nn.Parameter]) -> dict[nn.Parameter, DTensor]:
    """Return those of the parameters that engines keep whole between passes, and their shards."""
    values = ((each, found(each)) for each in parameters)
    return {
        each: known.shard
        for each, known in values
        if known is not None and known.whole_parameter is each
    }


def _require_shards(parameters: list[nn.Parameter]) -> None:
    """Raise InputError for weights of some model, as they are gathered for a pass."""
    for root in holders(Root):
        root.require_shards(parameters, "GatheredParameters was given")


def _require_rank(modifier_rank: int | None, sharded: list[DTensor]) -> None:
    """Raise InputError unless the rank exists and is in the mesh of every parameter."""
    if modifier_rank is None:
        return
    number = world_size()
    if not 0 <= modifier_rank < number:
        raise InputError(f"modifier_rank = {modifier_rank}: expected a rank from 0 to {number - 1}")
    for mesh in {parameter.device_mesh for parameter in sharded}:
        ranks = mesh.mesh.flatten().tolist()
        if modifier_rank not in ranks:
            raise InputError(
                f"modifier_rank = {modifier_rank}: the parameters are sharded over the ranks "
                f"{ranks}; give one of these"
            )


@contextmanager
def _in_place_of(sharded: list[DTensor], wholes: list[fsdp.WholeParameter]) -> Iterator[None]:
    """Swap parameters with whole ones; what was gathered for passes is dropped before and after."""
    _free_gathered(sharded)
    for parameter, whole in zip(sharded, wholes, strict=True):
        torch.utils.swap_tensors(parameter, whole)  # every reference now sees the whole one
    try:
        yield
    finally:
        for parameter, whole in zip(sharded, wholes, strict=True):
            torch.utils.swap_tensors(parameter, whole)
        _free_gathered(sharded)


def _free_gathered(shards: list[DTensor]) -> None:
    for kept in holders(KeptWeights):
        kept.free(shards)


def _groups_of(parameter: DTensor) -> list[dist.ProcessGroup]:
    """This rank's group along each axis of a parameter's mesh that has several ranks.

    The mesh of stage 0 has all ranks on its first axis, that of layers they split some on each.
    """
    mesh = parameter.device_mesh
    axes = [axis for axis in range(mesh.ndim) if mesh.size(axis) > 1]
    return [mesh.get_group(axis) for axis in axes or [0]]


def _broadcast(values: torch.Tensor, mesh: DeviceMesh, source: int) -> None:
    """Send `values` of the rank `source` to all ranks of a mesh, along one axis after another."""
    places = (mesh.mesh == source).nonzero()[0].tolist()
    for axis, place in enumerate(places):
        if mesh.size(axis) > 1:
            group = mesh.get_group(axis)
            dist.broadcast(values, src=dist.get_global_rank(group, place), group=group)


@torch.no_grad()
def _write_back(wholes: list[torch.Tensor], shards: list[DTensor], source: int) -> None:
    """Broadcast each whole tensor from the rank that changed it, and keep this rank's shard."""
    for whole, shard in zip(wholes, shards, strict=True):
        values = whole.detach().as_subclass(torch.Tensor).contiguous()
        _broadcast(values, shard.device_mesh, source)
        if isinstance(whole, fsdp.WholeParameter):
            shard.to_local().copy_(part_for_rank(values, shard))
            continue
        whole.data.copy_(values)  # which engines keep
        if is_whole(shard):  # at stage 0, where all ranks must have the same fp32 weights
            _broadcast(local_part(found(whole).weight.detach()), shard.device_mesh, source)


__getattr__ = attribute_of(__name__)
