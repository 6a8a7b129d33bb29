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

from zeropp.capabilities.offload.offloaded import offloaded_adamw
from zeropp.deepspeed.comm import DEEPSPEED_PORT, init_distributed, refuse_port
from zeropp.deepspeed.engine import Engine
from zeropp.deepspeed.expert_parallel.ranks import experts_to_split, split
from zeropp.deepspeed.fp32_weights import use_fp32_weights
from zeropp.deepspeed.ops import adam
from zeropp.deepspeed.parameter_values import found
from zeropp.deepspeed.runtime.config import as_refusals
from zeropp.deepspeed.runtime.dataloader import build_loader
from zeropp.deepspeed.runtime.named_optimizer import named_optimizer
from zeropp.errors import RefusedCall
from zeropp.optim.adam import FusedAdam, parameters_in
from zeropp.optim.cpu_adam import CPUAdam
from zeropp.optim.lr_schedule import build_scheduler
from zeropp.optim.on_shards import require_on_shards
from zeropp.optim.remap import Names, listed, names_of, remap, remapped
from zeropp.ranks.coordination import among
from zeropp.ranks.process_group import pick_device
from zeropp.ranks.topology import Environment
from zeropp.settings.zero_config import ZeroConfig
from zeropp.sharding.checks import require_common_steps, require_same_model
from zeropp.sharding.grid import data_axis
from zeropp.sharding.materialize import copy_from_first_rank
from zeropp.sharding.recorded_tensor import not_recording
from zeropp.sharding.shard import shard
from zeropp.sharding.sharding import Sharding

AXIS = "fsdp"  # by this name PEFT knows that a sharded layer computes with full weights
OFFLOADABLE = (torch.optim.AdamW, torch.optim.Adam, FusedAdam, CPUAdam)

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
    environment, device = _join(dist_init_required)
    mesh = _data_mesh(mesh_param, environment, device)
    notices = tuple(_notices(zero, optimizer, lr_scheduler))
    environment = replace(environment, world_size=mesh.size())
    with as_refusals():
        batch = zero.resolve_batch(mesh.size())
    names = names_of(model)
    parameters = None if model_parameters is None else listed(model_parameters)
    require_same_model(model, mesh, caller="zeropp.initialize", with_buffers=True)
    to_split = experts_to_split(model, mesh, zero)
    copy_from_first_rank(model, mesh.get_group(), device)
    held = parameters or getattr(optimizer, "param_groups", ())
    use_fp32_weights(model, parameters_in(held), zero.compute_format)
    experts = split(to_split, mesh, zero)
    sharding = shard(model, mesh, zero.without_engine(), experts=experts.meshes)
    _require_memory(model)
    if not sharding.units:
        model.to(device)
    optimizer = _build_optimizer(zero, optimizer, parameters, names, model)
    with among(mesh.get_group()):
        optimizer = _offload_optimizer(zero, optimizer, sharding, device)
    schedule = _build_schedule(zero, lr_scheduler, optimizer)
    loader = build_loader(training_data, collate_fn, batch, mesh)
    engine = Engine(sharding, zero, batch, environment, device, optimizer, schedule)
    engine.training_dataloader = loader
    engine.token_traffic = experts.traffic
    if optimizer is not None:  # DeepSpeed has this call on the optimizer
        optimizer.quantize_nontrainable_params = engine.quantize_nontrainable_params
    if mesh.get_local_rank() == 0:
        _log(engine, (*notices, *experts.lines))
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


def _join(dist_init_required: bool | None) -> tuple[Environment, torch.device]:
    """Join the default process group; return this process's environment and device."""
    environment = Environment.read()
    device = pick_device(environment)
    init_distributed(dist_init_required=dist_init_required)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if (rank, world_size) != (environment.rank, environment.world_size):
        local_rank = environment.local_rank
        environment = Environment(rank=rank, world_size=world_size, local_rank=local_rank)
    return environment, device


def _data_mesh(
    mesh: DeviceMesh | None, environment: Environment, device: torch.device
) -> DeviceMesh:
    """Return the mesh that was given, or one of all ranks. Raises InputError if it is unusable."""
    if mesh is None:
        mesh = init_device_mesh(device.type, (environment.world_size,), mesh_dim_names=(AXIS,))
    return data_axis(mesh, None)


def _require_memory(model: nn.Module) -> None:
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_meta:
            raise RefusedCall(
                f"{name} is on the meta device, and its values are unknown: build the model inside "
                "zeropp.zero.Init(), which records its initialization"
            )


def _build_optimizer(
    zero: ZeroConfig, optimizer: Any, chosen: list | None, names: Names, model: nn.Module
) -> torch.optim.Optimizer | None:
    """Return the optimizer of the sharded model's parameters.

    optimizer: an optimizer of the unsharded ones, a function that makes one, or None. chosen:
    parameters or groups to optimize, None for all trainable ones.
    """
    if isinstance(optimizer, torch.optim.Optimizer):
        _compare(optimizer, chosen)
        remap(optimizer, names, model)
        return optimizer
    if optimizer is None and zero.optimizer.type is None:
        return None
    if chosen is None:
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if not parameters:
            raise RefusedCall(
                "all parameters are frozen, and an optimizer is named or given: leave it out, or "
                "train some (requires_grad_(True)); adapters may be added before zeropp.initialize"
            )
    else:
        parameters = remapped(chosen, names, model)
    if optimizer is not None:
        result = optimizer(parameters)
        if not isinstance(result, torch.optim.Optimizer):
            raise RefusedCall(
                f"optimizer= is neither a torch.optim.Optimizer nor a function that makes one: it "
                f"made a {type(result).__name__}"
            )
        return result
    return named_optimizer(zero, parameters, model)


def _compare(optimizer: torch.optim.Optimizer, chosen: list | None) -> None:
    """Say that the optimizer's parameters count where `model_parameters` are more.

    Raises InputError if the optimizer has others, too.
    """
    held = {*map(id, parameters_in(optimizer.param_groups))}
    given = held if chosen is None else {*map(id, parameters_in(chosen))}
    if not held <= given:
        raise RefusedCall(
            "model_parameters are not those of the optimizer that is given too: leave them out"
        )
    if held < given:
        log.info(
            "model_parameters has no effect: the %d parameters of the optimizer that was given are "
            "trained, and not the %d others",
            len(held),
            len(given - held),
        )


def _offload_optimizer(
    zero: ZeroConfig,
    optimizer: torch.optim.Optimizer | None,
    sharding: Sharding,
    device: torch.device,
) -> torch.optim.Optimizer | None:
    """Replace the optimizer by one on the host if the JSON asks for it.

    The old optimizer then shares the new one's groups, so that a schedule made for it still works.
    """
    if optimizer is not None:
        require_on_shards(optimizer)
    if optimizer is None or not zero.offloads_optimizer:
        if optimizer is not None and zero.offloads_weights:
            log.info("offload_param: the optimizer updates the weights on the host, where they are")
        return optimizer
    kind = type(optimizer)
    if kind not in (*OFFLOADABLE, adam.FusedAdam, adam.DeepSpeedCPUAdam):
        supported = ", ".join(
            f"{cls.__module__.rpartition('.')[0]}.{cls.__name__}" for cls in OFFLOADABLE
        )
        raise RefusedCall(
            f"{kind.__name__} cannot be offloaded: of optimizers given to zeropp.initialize "
            f"{supported} can; or name Adam or AdamW in the JSON"
        )
    if len(optimizer.state):
        raise RefusedCall(
            f"the {kind.__name__} given to zeropp.initialize has state already, and offloading "
            "cannot keep it: give one without state"
        )
    settings = {name: optimizer.defaults[name] for name in ("lr", "betas", "eps", "weight_decay")}
    settings["adam_w_mode"] = kind is torch.optim.AdamW
    if isinstance(optimizer, FusedAdam):
        settings["adam_w_mode"] = optimizer.defaults["decoupled_weight_decay"]
        settings["bias_correction"] = optimizer.bias_correction
        settings["moments"] = (optimizer.moment_dtype, optimizer.seed)
    offloaded = offloaded_adamw(sharding, optimizer.param_groups, device, zero, **settings)
    optimizer.param_groups = offloaded.param_groups
    optimizer._opt_called = True  # schedules check this to warn about a missing optimizer step
    return offloaded


def _build_schedule(
    zero: ZeroConfig, lr_scheduler: Any, optimizer: torch.optim.Optimizer | None
) -> LRScheduler | None:
    if lr_scheduler is None:
        return build_scheduler(optimizer, zero.scheduler) if zero.scheduler.type else None
    if not hasattr(lr_scheduler, "step"):
        return lr_scheduler(optimizer)
    scheduled = getattr(lr_scheduler, "optimizer", optimizer)
    if scheduled.param_groups is not optimizer.param_groups:  # one that is offloaded shares them
        raise RefusedCall(
            f"lr_scheduler=, a {type(lr_scheduler).__name__}, was made for another optimizer than "
            "the engine's, whose rates it would not change: give that one as optimizer=, or a "
            "function that makes the schedule from the engine's optimizer"
        )
    return lr_scheduler
