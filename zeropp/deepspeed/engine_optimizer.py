"""The optimizer and the schedule of an engine: given, made by a function, or named in the JSON."""

import logging
from collections.abc import Iterable
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from zeropp.capabilities.muon.groups import groups_of, stacks_of
from zeropp.capabilities.muon.matrix_step import MuonOptions
from zeropp.capabilities.muon.muon import Muon
from zeropp.capabilities.offload.offloaded_adam import offloaded_adamw
from zeropp.deepspeed.lr_schedule import build_scheduler
from zeropp.deepspeed.ops import adam
from zeropp.errors import InputError, RefusedCall
from zeropp.optim.adam import FusedAdam, fastest_adamw, parameters_in
from zeropp.optim.cpu_adam import CPUAdam
from zeropp.optim.remap import Names, remap, remapped, require_on_shards
from zeropp.ranks.coordination import among
from zeropp.settings.zero_config import ZeroConfig
from zeropp.sharding.sharding import Sharding

HALVES = (torch.bfloat16, torch.float16)
JSON_LR = 1e-3  # DeepSpeed's default if the JSON names an optimizer without a rate
ADAM = MappingProxyType({"lr": JSON_LR, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0})
OFFLOADABLE = (torch.optim.AdamW, torch.optim.Adam, FusedAdam, CPUAdam)
log = logging.getLogger("zeropp")


def build_optimizer(
    zero: ZeroConfig,
    optimizer: Any,
    chosen: list | None,
    names: Names,
    sharding: Sharding,
    device: torch.device,
) -> Optimizer | None:
    """Return the optimizer of the sharded model's parameters, on the host if the JSON says so.

    optimizer: an optimizer of the unsharded ones, a function that makes one, or None. chosen:
    parameters or groups to optimize, None for all trainable ones.
    """
    made = _made(zero, optimizer, chosen, names, sharding.model)
    if made is None:
        return None
    require_on_shards(made)
    if zero.offloads_optimizer:
        with among(sharding.group):
            return _offloaded(zero, made, sharding, device)
    if zero.offloads_weights:
        log.info("offload_param: the optimizer updates the weights on the host, where they are")
    return made


def _made(
    zero: ZeroConfig, optimizer: Any, chosen: list | None, names: Names, model: nn.Module
) -> Optimizer | None:
    if isinstance(optimizer, Optimizer):
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
                "train some (requires_grad_(True)); layers may be added before zeropp.initialize"
            )
    else:
        parameters = remapped(chosen, names, model)
    if optimizer is not None:
        result = optimizer(parameters)
        if not isinstance(result, Optimizer):
            raise RefusedCall(
                f"optimizer= is neither a torch.optim.Optimizer nor a function that makes one: it "
                f"made a {type(result).__name__}"
            )
        return result
    return _named(zero, parameters, model)


def _compare(optimizer: Optimizer, chosen: list | None) -> None:
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


def _offloaded(
    zero: ZeroConfig, optimizer: Optimizer, sharding: Sharding, device: torch.device
) -> Optimizer:
    """Return an optimizer on the host in the place of one that is given.

    That one then shares the new one's groups, so that a schedule made for it still works.
    """
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
    settings = {name: optimizer.defaults[name] for name in ADAM}
    settings["adam_w_mode"] = kind is torch.optim.AdamW
    if isinstance(optimizer, FusedAdam):
        settings["adam_w_mode"] = optimizer.defaults["decoupled_weight_decay"]
        settings["bias_correction"] = optimizer.bias_correction
        settings["moments"] = (optimizer.moment_dtype, optimizer.seed)
    offloaded = offloaded_adamw(sharding, optimizer.param_groups, device, zero, **settings)
    optimizer.param_groups = offloaded.param_groups
    optimizer._opt_called = True  # schedules check this to warn about a missing optimizer step
    return offloaded


def build_schedule(
    zero: ZeroConfig, lr_scheduler: Any, optimizer: Optimizer | None
) -> LRScheduler | None:
    """Return the schedule: given, made by the function that is given, named in the JSON, or None.

    Raises InputError for one that was made for another optimizer.
    """
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


def _named(zero: ZeroConfig, parameters: list[Any], model: nn.Module) -> Optimizer:
    """Return the optimizer that the JSON names, ours or torch's, on a model's parameters or groups.

    Raises InputError for one that PyTorch does not have, and for parameters that Muon cannot take.
    """
    if zero.optimizer.type == "Muon":
        return _muon(zero, parameters, model)
    kind, settings = zero.optimizer.type, zero.optimizer.arguments()
    if kind in ("Adam", "AdamW"):
        settings = ADAM | settings
        settings["adam_w_mode"] |= kind == "AdamW"
        on_cpu = settings.pop("torch_adam")
        return fastest_adamw(parameters, torch_on_cpu=on_cpu, kind=adam.FusedAdam, **settings)
    if not hasattr(torch.optim, kind):
        raise InputError(
            f'optimizer.type = "{kind}": PyTorch {torch.__version__} has no torch.optim.{kind}; '
            "give zeropp.initialize an optimizer of that kind, or name another one"
        )
    return getattr(torch.optim, kind)(parameters, **settings)


def _muon(zero: ZeroConfig, parameters: list[Any], model: nn.Module) -> Muon:
    """Return Muon for matrices among the parameters, which are chosen unless groups say so."""
    settings = {"lr": JSON_LR, "weight_decay": 0.0} | zero.optimizer.arguments()
    if "eps" in settings:
        settings["adam_eps"] = settings.pop("eps")
    lr = settings["lr"]
    rates = {True: settings.pop("muon_lr", lr), False: settings.pop("adam_lr", lr)}
    groups = groups_of(model, parameters)
    for group in groups:
        group.setdefault("lr", rates[group["use_muon"]])
        name = "Muon" if group["use_muon"] else "AdamW"
        log.info("%s: %d parameters at lr %g", name, len(group["params"]), group["lr"])
    settings |= {"options": MuonOptions.of(zero), "parts": stacks_of(model)}
    return Muon(groups, config=zero, **settings)


def use_fp32_weights(model: nn.Module, also: Iterable[torch.Tensor], compute_format: str) -> None:
    """Make fp32, in place, the 16-bit parameters that are trained, and those in `also`.

    In 16 bit most updates would be rounded away. DeepSpeed has fp32 copies for its optimizer; here
    FSDP2's shards are those, and are cast to the compute format when they are gathered.
    Frozen parameters and buffers stay as they are, unless the model computes in fp32. Statistics of
    batches become fp32 too: the share of a new batch would be rounded away.
    """
    also_ids = {id(parameter) for parameter in also}
    whole = compute_format == "float32"
    tensors = [
        parameter
        for parameter in model.parameters()
        if whole or parameter.requires_grad or id(parameter) in also_ids
    ]
    if whole:
        tensors += model.buffers()
    else:
        keeping = (module for module in model.modules() if hasattr(module, "running_mean"))
        tensors += (buffer for module in keeping for buffer in module.buffers(recurse=False))
    halves = [tensor for tensor in tensors if tensor.dtype in HALVES]
    for tensor in halves:
        tensor.data = tensor.data.float()
        if tensor.grad is not None:
            tensor.grad = tensor.grad.float()
    if halves:
        elements = sum(tensor.numel() for tensor in halves)
        log.info("converted %s 16-bit weights of the model to fp32", f"{elements:,}")
