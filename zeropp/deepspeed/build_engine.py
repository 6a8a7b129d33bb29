"""`zeropp.initialize`: from a model and DeepSpeed's JSON to an engine, with DeepSpeed's interface.

It initializes torch.distributed if necessary, copies the first rank's weights to all ranks, shards
the model as the JSON says, and makes the optimizer and the schedule hold the shards.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset

from zeropp.deepspeed.comm import DEEPSPEED_PORT, init_distributed, refuse_port
from zeropp.deepspeed.engine import Engine
from zeropp.deepspeed.engine_optimizer import build_optimizer, build_schedule, use_fp32_weights
from zeropp.deepspeed.expert_parallel.split_experts import describe, experts_to_split, split
from zeropp.deepspeed.parameter_values import found
from zeropp.deepspeed.runtime.config import as_refusals
from zeropp.deepspeed.runtime.dataloader import build_loader
from zeropp.errors import RefusedCall
from zeropp.optim.adam import parameters_in
from zeropp.optim.remap import listed, names_of
from zeropp.ranks.process_group import pick_device
from zeropp.ranks.topology import Environment
from zeropp.settings.zero_config import ZeroConfig
from zeropp.sharding.checks import require_common_steps, require_same_model
from zeropp.sharding.grid import data_axis
from zeropp.sharding.recorded_tensor import not_recording
from zeropp.sharding.shard import copy_from_first_rank, shard
from zeropp.wire.rank_group import AXES
from zeropp.wire.traffic import Traffic

AXIS = "fsdp"  # by this name PEFT knows that a sharded layer computes with full weights
log = logging.getLogger("zeropp")


@not_recording()
def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | Callable | None = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Dataset | None = None,
    lr_scheduler: LRScheduler | Callable | None = None,
    distributed_port: int = DEEPSPEED_PORT,
    *,
    mpu: None = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable | None = None,
    config: Mapping | Path | str | None = None,
    mesh_param: DeviceMesh | None = None,
    config_params: Mapping | Path | str | None = None,
) -> tuple[Engine, torch.optim.Optimizer | None, DataLoader | None, LRScheduler | None]:
    """Shard `model` in place as the JSON says; return (engine, optimizer, data loader, schedule).

    `config` is a path, a JSON text or a dict; `args.deepspeed_config` and `config_params` mean the
    same. `optimizer` was built on the unsharded model's parameters, or is a function from
    parameters to an optimizer, or is named in the JSON; it steps `model_parameters`, by default all
    that require gradients. `lr_scheduler` is an object, a function from the optimizer, or named in
    the JSON. `training_data` (a stream must be the same on all ranks) is made into a loader of this
    rank's micro-batches. Raises InputError for missing, contradictory and unsupported arguments.
    """
    _refuse_unsupported(distributed_port, mpu, mesh_param)
    _require_model(model)
    zero = _read_config(args, config, config_params)
    _require_clear(zero, optimizer, lr_scheduler)
    environment, device, mesh = _join(dist_init_required, mesh_param)
    notices = tuple(_notices(zero, optimizer, lr_scheduler))
    with as_refusals():
        batch = zero.resolve_batch(mesh.size())
    names = names_of(model)
    parameters = None if model_parameters is None else listed(model_parameters)
    require_same_model(model, mesh, caller="zeropp.initialize", with_buffers=True)
    to_split = experts_to_split(model, mesh, zero)
    copy_from_first_rank(model, mesh.get_group(), device)
    held = parameters or getattr(optimizer, "param_groups", ())
    use_fp32_weights(model, parameters_in(held), zero.compute_format)
    tokens = Traffic(AXES)
    experts = split(model, to_split, mesh, zero, tokens)
    sharding = shard(model, mesh, zero.without_engine(), experts=experts)
    _require_memory(model)
    if not sharding.units:
        model.to(device)
    optimizer = build_optimizer(zero, optimizer, parameters, names, sharding, device)
    schedule = build_schedule(zero, lr_scheduler, optimizer)
    loader = build_loader(training_data, collate_fn, batch, mesh)
    engine = Engine(sharding, zero, batch, environment, device, optimizer, schedule)
    engine.training_dataloader = loader
    engine.token_traffic = tokens
    if optimizer is not None:  # DeepSpeed has this call on the optimizer
        optimizer.quantize_nontrainable_params = engine.quantize_nontrainable_params
    if mesh.get_local_rank() == 0:
        _log(engine, (*notices, *describe(experts)))
    return engine, optimizer, loader, schedule


def _log(engine: Engine, lines: Iterable[str]) -> None:
    for line in lines:
        log.info(line)
    sharding, batch = engine.sharding, engine.batch
    log.info("ZeRO stage %d, %d ranks, %s", sharding.stage, engine.world_size, batch)
    for name, text in sharding.describe(batch.micro_batches):
        log.info("%s: %s", name, text)


def _require_model(model: Any) -> None:
    """Raise InputError for anything but a model in at most fp32 that is not sharded yet."""
    if not isinstance(model, nn.Module):
        kind = type(model).__name__
        raise RefusedCall(f"zeropp.initialize needs model=, an nn.Module, not {kind}")
    if any(isinstance(each, DTensor) or found(each) for each in model.parameters()):
        raise RefusedCall(
            "the model given to zeropp.initialize is sharded already, by an earlier call: go on "
            "with the engine of that call, or build the model anew and load what was saved"
        )
    for name, parameter in model.named_parameters():
        if parameter.dtype == torch.float64:
            raise RefusedCall(
                f"parameter {name} is torch.float64, but an engine computes and updates at most "
                "fp32: call model.float() first"
            )


def _refuse_unsupported(distributed_port: int, mpu: Any, mesh_param: Any) -> None:
    refuse_port(distributed_port)
    if mpu is not None:
        raise RefusedCall(
            "mpu: there are no tensor- or pipeline-parallel ranks here; leave it out, and all "
            "ranks are data-parallel"
        )
    if mesh_param is not None and not isinstance(mesh_param, DeviceMesh):
        raise RefusedCall(
            f"mesh_param = {mesh_param!r}: expected a torch DeviceMesh of one axis, or nothing for "
            "all ranks; sequence parallelism is not available"
        )


def _read_config(args: Any, config: Any, config_params: Any) -> ZeroConfig:
    arguments = {
        "config": config,
        "config_params": config_params,
        "args.deepspeed_config": getattr(args, "deepspeed_config", None),
        "args.deepscale_config": getattr(args, "deepscale_config", None),  # its oldest name
    }
    sources = {name: value for name, value in arguments.items() if value is not None}
    if not sources:
        raise RefusedCall(
            "zeropp.initialize needs config=, a path or a dict of DeepSpeed's JSON "
            "(or args.deepspeed_config)"
        )
    if len(sources) > 1:
        raise RefusedCall(f"{' and '.join(sources)} are both given; keep one")
    with as_refusals():
        return ZeroConfig.from_json(*sources.values())


def _require_clear(zero: ZeroConfig, optimizer: Any, lr_scheduler: Any) -> None:
    """Raise InputError for keys that are "auto" or not for engines, and for a schedule alone."""
    require_common_steps(zero, "zeropp.initialize")
    given = {"optimizer": optimizer is not None, "scheduler": lr_scheduler is not None}
    unfilled = sorted(
        name for name in zero.unresolved_auto_keys if not given.get(name.partition(".")[0])
    )
    if unfilled:
        raise RefusedCall(
            f'{zero.source}: {", ".join(unfilled)} = "auto": zeropp.initialize has no other '
            "setting to take it from; write the value"
        )
    has_schedule = zero.scheduler.type is not None or lr_scheduler is not None
    if has_schedule and optimizer is None and zero.optimizer.type is None:
        raise RefusedCall("a learning-rate schedule without an optimizer: give or name one too")


def _notices(zero: ZeroConfig, optimizer: Any, lr_scheduler: Any) -> Iterator[str]:
    """Yield a line for each key without effect, also because an argument takes its place."""
    yield from zero.notices()
    for name, argument in (("optimizer", optimizer), ("scheduler", lr_scheduler)):
        json_type = zero.value(f"{name}.type")
        if argument is not None and json_type is not None:
            yield (
                f'{name}.type = "{json_type}" in the JSON has no effect: zeropp.initialize was '
                "given one, which is used"
            )


def _join(
    dist_init_required: bool | None, mesh: DeviceMesh | None
) -> tuple[Environment, torch.device, DeviceMesh]:
    """Join the default process group; return an engine's environment, device and mesh.

    That is the given one, or one of all ranks. Raises InputError if it is unusable.
    """
    environment = Environment.read()
    device = pick_device(environment)
    init_distributed(dist_init_required=dist_init_required)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if (rank, world_size) != (environment.rank, environment.world_size):
        local_rank = environment.local_rank
        environment = Environment(rank=rank, world_size=world_size, local_rank=local_rank)
    if mesh is None:
        mesh = init_device_mesh(device.type, (world_size,), mesh_dim_names=(AXIS,))
    mesh = data_axis(mesh, None)
    return replace(environment, world_size=mesh.size()), device, mesh


def _require_memory(model: nn.Module) -> None:
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_meta:
            raise RefusedCall(
                f"{name} is on the meta device, and its values are unknown: build the model inside "
                "zeropp.zero.Init(), which records its initialization"
            )
