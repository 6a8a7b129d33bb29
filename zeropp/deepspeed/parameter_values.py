"""What an engine holds of one parameter: its fp32 weight, its gradient, its optimizer's state.

A function of `deepspeed.utils` gets a parameter and no engine: it asks all engines that live.

What programs ask a parameter itself are DeepSpeed's attributes `ds_id` and others, which it has at
ZeRO stage 3 and from `zero.Init` on:

    if hasattr(parameter, "ds_id"):
        with deepspeed.zero.GatheredParameters([parameter]):
            weight = parameter.detach().cpu().clone()
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_parameter_registration_hook

from zeropp import fsdp_adapter as fsdp
from zeropp.errors import InputError
from zeropp.fsdp_adapter import local_part
from zeropp.optim.sharded_optimizer import sharded
from zeropp.sharding.recorded_tensor import RecordedTensor
from zeropp.sharding.shard import part_for_rank
from zeropp.sharding.sharding import Sharding
from zeropp.wire.shard_holders import holders, notify_written

NAMES = ("ds_id", "ds_status", "ds_shape", "ds_numel", "ds_tensor")


def found(parameter: torch.Tensor) -> "ParameterValues | None":
    """Return the values of an engine's parameter, also of a frozen one; None for other tensors."""
    engines = reversed(holders(ParameterOwner))
    return next(filter(None, (each.parameter_values(parameter) for each in engines)), None)


def values_of(parameter: torch.Tensor) -> "ParameterValues | None":
    """Return the values of an engine's parameter; None if it is frozen.

    Raises InputError for any other tensor, and inside `GatheredParameters` of it.
    """
    if (values := found(parameter)) is None:
        raise InputError(
            f"a parameter of shape {list(parameter.shape)} is not one of an engine's: take it from "
            "engine.module after zeropp.initialize, which puts shards in the places of parameters"
        )
    if isinstance(values.shard, fsdp.WholeParameter):
        raise InputError(
            "inside GatheredParameters the values of its parameters are in them: read and write "
            "these, or call this outside"
        )
    return values if parameter.requires_grad else None


def take_gradients(parameters: Iterable[torch.Tensor]) -> None:
    """Let shards have the gradients that a program has set of whole parameters."""
    for each in parameters:
        if each.grad is not None and (values := found(each)) and values.whole_parameter is each:
            shard, part = values.shard, part_for_rank(each.grad, values.shard)
            shard.grad, each.grad = fsdp.shard_like(shard, part.to(local_part(shard))), None


@dataclass(frozen=True, kw_only=True)
class ParameterValues:
    """Reads and writes what belongs to one trained parameter; all ranks write alike.

    `shard` is the parameter as the optimizer of its `engine` knows it, `unit` the FSDP unit that it
    is in, if it is sharded.
    """

    engine: "ParameterOwner"
    shard: nn.Parameter
    unit: fsdp.FSDPModule | None

    @property
    def weight(self) -> nn.Parameter:
        """The fp32 weight, which takes what was written to the whole parameter."""
        self.engine.sharding.take(self.shard)
        return self._master

    @property
    def whole_parameter(self) -> nn.Parameter | None:
        """The whole parameter that the model holds instead of the shard, if it does."""
        return None if self.unit is None else fsdp.whole_of(self.unit, self.shard)

    @property
    def _master(self) -> nn.Parameter:
        """The fp32 weight: the optimizer's, where it has its own."""
        return sharded(self.engine.optimizer).masters.get(self.shard, self.shard)

    @property
    def gradient(self) -> torch.Tensor | None:
        """The mean over the ranks, or this rank's whole gradient before it was averaged."""
        sharded(self.engine.optimizer).await_gradients()
        if (mean := self._master.grad) is not None or self.unit is None:
            return mean
        return fsdp.unreduced_gradient(self.unit, self.shard)

    def state(self, key: str) -> torch.Tensor | None:
        """The optimizer's state of that name, sharded as the weight is if it has its shape."""
        if self.engine.optimizer is None:
            return None
        sharded(self.engine.optimizer).settle()
        master = self._master
        value = self.engine.optimizer.state.get(master, {}).get(key)
        if not isinstance(value, torch.Tensor):
            return None
        is_part = isinstance(master, DTensor) and not isinstance(value, DTensor)
        if is_part and value.ndim and value.shape == master.to_local().shape:
            return fsdp.shard_like(master, value)
        return value

    def read(self, tensor: torch.Tensor | None, *, whole: bool) -> torch.Tensor | None:
        """Return a copy of a tensor in fp32, on the device: of this rank's part, or of the whole,
        for which all ranks call it."""
        if tensor is None:
            return None
        part = tensor.detach() if whole else local_part(tensor.detach())
        copied = part.to(self.engine.device, torch.float32, copy=True)
        return fsdp.gather_whole(copied) if isinstance(copied, DTensor) else copied

    @torch.no_grad()
    def write(self, tensor: torch.Tensor, value: Any, *, whole: bool) -> None:
        """Write a whole value, or this rank's part of one, into a tensor."""
        expected = tensor.shape if whole else local_part(tensor).shape
        if not isinstance(value, torch.Tensor) or value.shape != expected:
            given = list(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
            part = "" if whole else "this rank's part, "
            raise InputError(f"the new value is {given}: expected {part}{list(expected)}")
        if whole and isinstance(tensor, DTensor):
            value = part_for_rank(value.detach().to(self.engine.device), tensor)
        local_part(tensor).copy_(value)

    def write_weight(self, value: Any, *, whole: bool) -> None:
        """Write the fp32 weight, and what the model computes with.

        Gathered weights are written too, if they are kept, and else dropped. If they are kept and
        only this rank's part is known, all ranks gather them.
        """
        weight, gathered = self.weight, self.whole_parameter
        is_known = whole and gathered is not None
        self.write(self.shard, value, whole=whole)
        # an optimizer with masters reads the rounded one
        notify_written([self.shard], gathered=is_known)
        if local_part(weight).data_ptr() != local_part(self.shard).data_ptr():
            self.write(weight, value, whole=whole)
        if is_known:
            self.write(gathered, value, whole=True)
        else:
            self.engine.sharding.gather()


class ParameterOwner:
    """An engine as the owner of its model's parameters, which may be gathered."""

    module: nn.Module
    sharding: Sharding
    optimizer: torch.optim.Optimizer | None
    device: torch.device

    def parameter_values(self, parameter: torch.Tensor) -> ParameterValues | None:
        """Return what the engine holds of a parameter; None for that of another model."""
        of_units = ((unit, fsdp.shard_of(unit, parameter)) for unit in self.sharding.units)
        unit, shard = next((found for found in of_units if found[1] is not None), (None, None))
        if shard is None and any(parameter is each for each in self.module.parameters()):
            shard = parameter
        if shard is None:
            return None
        return ParameterValues(engine=self, shard=shard, unit=unit)


class ZeroParamStatus(Enum):
    """Whether a parameter is whole on this rank, or is being gathered."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


def mark_sharded(parameters: Iterable[nn.Parameter], *, are_sharded: bool = True) -> None:
    """Set DeepSpeed's attributes on parameters, or remove them; to be repeated for new shards.

    ds_id: different for each parameter of this process. ds_status: a `ZeroParamStatus`. ds_shape,
    ds_numel: of the whole parameter. ds_tensor: this rank's rows, in the memory of the shard.
    """
    for parameter in parameters:
        if are_sharded:
            _set_attributes(parameter)
            parameter.ds_tensor = local_part(parameter.detach())
        else:
            for name in NAMES:
                vars(parameter).pop(name, None)


@contextmanager
def marking_recorded() -> Iterator[None]:
    """Set the attributes, but `ds_tensor`, on parameters that are built inside without memory."""

    def mark(_: nn.Module, __: str, parameter: nn.Parameter | None) -> None:
        if isinstance(parameter, RecordedTensor):
            _set_attributes(parameter)

    with register_module_parameter_registration_hook(mark):
        yield


@contextmanager
def available(parameters: Iterable[torch.Tensor]) -> Iterator[None]:
    """Let those that have a status be available inside."""
    marked = [each for each in parameters if hasattr(each, "ds_status")]
    before = [each.ds_status for each in marked]
    for each in marked:
        each.ds_status = ZeroParamStatus.AVAILABLE
    try:
        yield
    finally:
        for each, status in zip(marked, before, strict=True):
            each.ds_status = status


def _set_attributes(parameter: nn.Parameter) -> None:
    parameter.ds_id = id(parameter)
    parameter.ds_status = ZeroParamStatus.NOT_AVAILABLE
    parameter.ds_shape, parameter.ds_numel = parameter.shape, parameter.numel()
