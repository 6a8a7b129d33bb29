"""Small functions and constants of DeepSpeed's that public programs import."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from operator import attrgetter
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zeropp.deepspeed.zero import GatheredParameters
from zeropp.errors import Unavailable

torch_info = MappingProxyType(
    {
        "version": torch.__version__,
        "cuda_version": torch.version.cuda or "0.0",
        "bf16_support": True,
    }
)


class _OfShards(type):
    def __instancecheck__(cls, optimizer: object) -> bool:
        return getattr(optimizer, "is_sharded", False)


class ZeROOptimizer(metaclass=_OfShards):
    """The kind of an engine's optimizer at stages 1 to 3, for `isinstance`."""


class StateDevice(str, Enum):
    """Where states may be; "nvme" is refused by the JSON."""

    none, cpu, nvme = "none", "cpu", "nvme"


@contextmanager
def OnDevice(  # noqa: N802  (DeepSpeed's name)
    dtype: torch.dtype, device: torch.device | str = "meta", enabled: bool = True
) -> Iterator[None]:
    """Make tensors on a device, and those of floating point in a dtype, unless others are given."""
    if not enabled:
        yield
        return
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def unwrap_model_for_generation(model: nn.Module) -> Iterator[nn.Module]:
    """Yield an engine's module with whole weights; all ranks enter it."""
    module = getattr(model, "module", model)
    with GatheredParameters([*module.parameters()]):
        yield module


def is_zero_param(parameter: Any) -> bool:
    """Whether a parameter is sharded, so that its values must be gathered."""
    return isinstance(parameter, torch.Tensor) and hasattr(parameter, "ds_id")


def split_params_into_different_moe_groups_for_optimizer(
    param_groups: Mapping[str, Any] | list | tuple, max_group_size: float | None = None
) -> list[Mapping[str, Any]]:
    """Return the groups as a list. Raises InputError for parameters of DeepSpeed's own experts."""
    groups = [param_groups] if isinstance(param_groups, Mapping) else [*param_groups]
    if not all(getattr(each, "allreduce", True) for group in groups for each in group["params"]):
        raise Unavailable("experts of DeepSpeed's class MoE are not available here: see AutoEP")
    return groups


def recursive_getattr(model: nn.Module, module_name: str) -> Any:
    """Return what is at a dotted name in a model."""
    return attrgetter(module_name)(model)


def recursive_setattr(model: nn.Module, module_name: str, module: nn.Module) -> None:
    """Put a module at a dotted name in a model."""
    owner, _, name = module_name.rpartition(".")
    (recursive_getattr(model, owner) if owner else model).register_module(name, module)


def world() -> dist.ProcessGroup:
    """Return the group of all ranks, which is that of the data-parallel ones."""
    return dist.group.WORLD


def identity(function: Callable) -> Callable:
    """Return a function as it is, as one that is not marked for a profiler."""
    return function
