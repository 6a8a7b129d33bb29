"""`zeropp.initialize`: from a model and DeepSpeed's JSON to an engine, in DeepSpeed's shape.

Joins the ranks where nobody has, gives all of them the first rank's weights, shards the model by
the JSON, and makes optimizer and schedule hold the shards.
"""

import logging
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

from zeropp.deepspeed.engine import Batch, Engine
from zeropp.errors import InputError
from zeropp.optim.adam import FusedAdam, fastest_adamw
from zeropp.optim.cpu_adam import CPUAdam
from zeropp.optim.lr_schedule import build_scheduler
from zeropp.optim.offloaded import offloaded_adamw
from zeropp.optim.remap import Names, listed, names_of, remap, remapped
from zeropp.ranks.process_group import pick_device, start_process_group
from zeropp.ranks.topology import Environment
from zeropp.settings.zero_config import ZeroConfig
from zeropp.sharding.materialize import copy_from_first_rank
from zeropp.sharding.shard import shard
from zeropp.sharding.sharding import Sharding

AXIS = "fsdp"  # a name by which PEFT knows that a sharded layer computes with whole weights
DEEPSPEED_PORT = 29500  # its default; here the launcher chooses the port
TIMEOUT = timedelta(minutes=30)  # for a collective, as torch's default
OFFLOADABLE = (torch.optim.AdamW, torch.optim.Adam, FusedAdam, CPUAdam)  # to what these do
JSON_LR = 1e-3  # DeepSpeed's, where the JSON names an optimizer and no rate

log = logging.getLogger("zeropp")


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
    """Shard `model` in place by the JSON; returns (engine, optimizer, data loader, schedule).

    `config` is a path, a JSON text or a dict; `args.deepspeed_config` and `config_params` mean the
    same. `optimizer` was built on the model's whole parameters, or is a function from parameters
    to an optimizer, or is named in the JSON; it steps `model_parameters`, by default all that
    require gradients. `lr_scheduler` is an object, a function from the optimizer, or named in the
    JSON. `training_data` gives a loader of this rank's micro-batches. Raises InputError for what
    is missing, contradictory or not available here.
    """
    _refuse(distributed_port, mpu, mesh_param)
    if not isinstance(model, nn.Module):
        kind = type(model).__name__
        raise InputError(f"zeropp.initialize needs model=, an nn.Module, not {kind}")
    if any(isinstance(one, DTensor) for one in model.parameters()):
        raise InputError("the model given to zeropp.initialize is sharded already: give a new one")
    zero = ZeroConfig.from_json(_one_config(args, config, config_params))
    _require_said(zero)
    _require_one(zero, optimizer, lr_scheduler)
    place, device = _join(dist_init_required)
    samples, micro_samples, micro_batches = zero.resolve_batch(place.world_size)
    batch = Batch(samples=samples, micro_samples=micro_samples, micro_batches=micro_batches)
    axis = (place.world_size,)
    mesh = mesh_param or init_device_mesh(device.type, axis, mesh_dim_names=(AXIS,))
    names = names_of(model)
    chosen = None if model_parameters is None else listed(model_parameters)
    copy_from_first_rank(model, mesh.get_group(), device)
    sharding = shard(model, mesh, zero)
    _require_memory(model)
    if not sharding.units:
        model.to(device)
    stepping = _optimizer(zero, optimizer, chosen, names, model)
    stepping = _offloaded(zero, stepping, sharding, device)
    schedule = _schedule(zero, lr_scheduler, stepping)
    engine = Engine(sharding, zero, batch, place, device, stepping, schedule)
    if stepping is not None:  # DeepSpeed has this call on the optimizer
        stepping.quantize_nontrainable_params = engine.quantize_nontrainable_params
    loader = _loader(training_data, collate_fn, batch, place)
    if place.rank == 0:
        for line in zero.notices_for_initialize:
            log.info(line)
        log.info("ZeRO stage %d, %d ranks, %s", zero.stage, place.world_size, batch)
        for what, how in sharding.describe(batch.micro_batches):
            log.info("%s: %s", what, how)
    return engine, stepping, loader, schedule


def _refuse(distributed_port: int, mpu: Any, mesh_param: Any) -> None:
    if distributed_port != DEEPSPEED_PORT:
        raise InputError(
            f"distributed_port = {distributed_port}: the launcher chooses the port; give it to "
            "torchrun (--master-port), or start the ranks with zeropp, which finds a free one"
        )
    if mpu is not None:
        raise InputError(
            "mpu: there are no tensor- or pipeline-parallel ranks here; leave it out, and all "
            "ranks are data-parallel"
        )
    if mesh_param is not None and not isinstance(mesh_param, DeviceMesh):
        raise InputError(
            f"mesh_param = {mesh_param!r}: expected a torch DeviceMesh of one axis, or nothing for "
            "all ranks; sequence parallelism is not available"
        )


def _one_config(args: Any, config: Any, config_params: Any) -> Any:
    given = {
        "config": config,
        "config_params": config_params,
        "args.deepspeed_config": getattr(args, "deepspeed_config", None),
    }
    given = {name: value for name, value in given.items() if value is not None}
    if not given:
        raise InputError(
            "zeropp.initialize needs config=, a path or a dict of DeepSpeed's JSON "
            "(or args.deepspeed_config)"
        )
    if len(given) > 1:
        raise InputError(f"{' and '.join(given)} are both given; keep one")
    return next(iter(given.values()))


def _require_said(zero: ZeroConfig) -> None:
    """Raise InputError where "auto" stands for a value that nobody fills here."""
    left = sorted(zero.unresolved_auto_keys)
    if left:
        raise InputError(
            f'{zero.source}: {", ".join(left)} = "auto": zeropp.initialize has no other setting to '
            "take it from; write the value"
        )


def _require_one(zero: ZeroConfig, optimizer: Any, lr_scheduler: Any) -> None:
    for name, given in (("optimizer", optimizer), ("scheduler", lr_scheduler)):
        named = zero.value(f"{name}.type")
        if given is not None and named is not None:
            raise InputError(
                f'{name}.type = "{named}" in the JSON, and zeropp.initialize got one too: keep one'
            )
    named = zero.scheduler.type
    if (named or lr_scheduler is not None) and optimizer is None and zero.optimizer.type is None:
        raise InputError("a learning-rate schedule without an optimizer: give or name one too")


def _join(dist_init_required: bool | None) -> tuple[Environment, torch.device]:
    """This process's place and device, in a process group."""
    place = Environment.read()
    device = pick_device(place)
    if not dist.is_initialized():
        if dist_init_required is False:
            raise InputError(
                "dist_init_required=False, and torch.distributed is not initialized: call "
                "torch.distributed.init_process_group first, or leave it to zeropp.initialize"
            )
        start_process_group(place, device, TIMEOUT)
    if (dist.get_rank(), dist.get_world_size()) != (place.rank, place.world_size):
        place = Environment(
            rank=dist.get_rank(), world_size=dist.get_world_size(), local_rank=place.local_rank
        )
    return place, device


def _require_memory(model: nn.Module) -> None:
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_meta:
            raise InputError(
                f"{name} is on the meta device, and nothing says what its values are: build the "
                "model inside zeropp.zero.Init(), which remembers that"
            )


def _optimizer(
    zero: ZeroConfig, given: Any, chosen: list | None, names: Names, model: nn.Module
) -> torch.optim.Optimizer | None:
    """The optimizer, on the sharded model's parameters."""
    if isinstance(given, torch.optim.Optimizer):
        if chosen is not None and _flat(chosen) != _flat(given.param_groups):
            raise InputError(
                "model_parameters are not those of the optimizer that is given too: leave them out"
            )
        remap(given, names, model)
        return given
    if given is None and zero.optimizer.type is None:
        return None
    if chosen is None:
        parameters = [one for one in model.parameters() if one.requires_grad]
        if not parameters:
            raise InputError(
                "all parameters are frozen, and an optimizer is named or given: leave it out, or "
                "train some (requires_grad_(True)); adapters may be added before zeropp.initialize"
            )
    else:
        parameters = remapped(chosen, names, model)
    if given is not None:
        made = given(parameters)
        if not isinstance(made, torch.optim.Optimizer):
            raise InputError(
                f"optimizer= is neither a torch.optim.Optimizer nor a function that makes one: it "
                f"made a {type(made).__name__}"
            )
        return made
    params = zero.optimizer.params
    settings = {
        "lr": JSON_LR if params.lr is None else params.lr,
        "betas": params.betas or (0.9, 0.999),
        "eps": 1e-8 if params.eps is None else params.eps,
        "weight_decay": params.weight_decay or 0.0,
        "torch_on_cpu": params.torch_adam,
    }
    return fastest_adamw(parameters, **settings)


def _offloaded(
    zero: ZeroConfig,
    optimizer: torch.optim.Optimizer | None,
    sharding: Sharding,
    device: torch.device,
) -> torch.optim.Optimizer | None:
    """The optimizer on the host, where the JSON has it there.

    A given one's groups are then those of the new one: a schedule made for it goes on.
    """
    if optimizer is None or not zero.offloads_optimizer:
        return optimizer
    kind = type(optimizer)
    if kind not in OFFLOADABLE:
        known = ", ".join(f"{one.__module__.rpartition('.')[0]}.{one.__name__}"
                          for one in OFFLOADABLE)  # fmt: skip
        raise InputError(
            f"{kind.__name__} cannot be offloaded: of optimizers given to zeropp.initialize "
            f"{known} can; or name Adam or AdamW in the JSON"
        )
    if len(optimizer.state):
        raise InputError(
            f"the {kind.__name__} given to zeropp.initialize has state already, and offloading "
            "cannot keep it: give a fresh one"
        )
    settings = {name: optimizer.defaults[name] for name in ("lr", "betas", "eps", "weight_decay")}
    settings["adam_w_mode"] = kind is torch.optim.AdamW
    if isinstance(optimizer, FusedAdam):
        settings["adam_w_mode"] = optimizer.defaults["decoupled_weight_decay"]
        settings["bias_correction"] = optimizer.bias_correction
        settings["moments"] = (optimizer.moment_dtype, optimizer.seed)
    moved = offloaded_adamw(sharding, optimizer.param_groups, device, zero, **settings)
    optimizer.param_groups = moved.param_groups
    optimizer._opt_called = True  # by which a schedule knows that steps come before its own
    return moved


def _flat(groups: Iterable[Any]) -> set[int]:
    found: set[int] = set()
    for one in groups:
        inside = one["params"] if isinstance(one, Mapping) else one
        found |= {id(inside)} if isinstance(inside, torch.Tensor) else {id(two) for two in inside}
    return found


def _schedule(
    zero: ZeroConfig, given: Any, optimizer: torch.optim.Optimizer | None
) -> LRScheduler | None:
    if given is not None:
        return given if hasattr(given, "step") else given(optimizer)
    return build_scheduler(optimizer, zero.scheduler) if zero.scheduler.type else None


def _loader(
    data: Dataset | None, collate_fn: Callable | None, batch: Batch, place: Environment
) -> DataLoader | None:
    """This rank's micro-batches, full ones only, shuffled alike on all ranks."""
    if data is None:
        return None
    sampler = None
    if not isinstance(data, IterableDataset):
        sampler = DistributedSampler(data, place.world_size, place.rank, drop_last=True)
    return DataLoader(
        data, batch.micro_samples, sampler=sampler, collate_fn=collate_fn, drop_last=True
    )
