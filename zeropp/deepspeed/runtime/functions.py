"""Small functions and constants of DeepSpeed's that public programs import."""

import gc
import sys
from argparse import ArgumentParser
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from functools import partial
from operator import attrgetter
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zeropp.deepspeed.zero import GatheredParameters
from zeropp.ranks.host_memory import free_bytes

SHARD_BYTES, COMPUTE_BYTES, GB = 16, 2, 2**30
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


def recursive_getattr(model: nn.Module, module_name: str) -> Any:
    """Return what is at a dotted name in a model."""
    return attrgetter(module_name)(model)


def recursive_setattr(model: nn.Module, module_name: str, module: nn.Module) -> None:
    """Put a module at a dotted name in a model."""
    model.set_submodule(module_name, module)


def world() -> dist.ProcessGroup:
    """Return the group of all ranks, which is that of the data-parallel ones."""
    return dist.group.WORLD


def identity(function: Callable, *_: object) -> Callable:
    """Return a function as it is.

    DeepSpeed marks functions for a profiler. Its `zero.Init` changes the dtype of what tensor
    constructors return, and transformers exempts `torch.arange` by replacing their wrapper.
    """
    return function


def add_config_arguments(parser: ArgumentParser) -> ArgumentParser:
    """Add `--deepspeed` and `--deepspeed_config` to the parser, and return it.

    `zeropp.initialize(args=...)` reads the path that `--deepspeed_config` gives. `--deepspeed` is
    for the program: nothing here reads it.

    Args:
        parser: The program's parser.

    Returns:
        The same parser.

    Example:
        ```python
        parser = deepspeed.add_config_arguments(ArgumentParser())
        args = parser.parse_args(["--deepspeed_config", "ds_config.json"])
        ```
    """
    group = parser.add_argument_group("DeepSpeed")
    group.add_argument("--deepspeed", action="store_true", help="use DeepSpeed's interface")
    group.add_argument("--deepspeed_config", metavar="FILE", help="the configuration, a JSON file")
    return parser


def clip_grad_norm_(parameters: Any, max_norm: float, norm_type: float = 2, mpu: Any = None) -> Any:
    """Clip gradients as `torch.nn.utils.clip_grad_norm_` does; return their norm."""
    return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)


def call_to_str(base: str, *args: Any, **kwargs: Any) -> str:
    """Return a call as Python spells it."""
    given = [*map(repr, args), *(f"{name}={value!r}" for name, value in kwargs.items())]
    return f"{base}({', '.join(given)})"


def see_memory_usage(message: str, force: bool = False) -> None:
    """Print a message and the memory in use, on rank 0; nothing unless `force` is set.

    MA and CA are what PyTorch has allocated and reserved on the GPU, Max_MA and Max_CA the most of
    it since the last call. On a machine without a GPU only the host's memory is printed.
    """
    if not force or (dist.is_initialized() and dist.get_rank() != 0):
        return
    gc.collect()
    lines = [message]
    if torch.cuda.is_available():
        numbers = {
            "MA": torch.cuda.memory_allocated(),
            "Max_MA": torch.cuda.max_memory_allocated(),
            "CA": torch.cuda.memory_reserved(),
            "Max_CA": torch.cuda.max_memory_reserved(),
        }
        lines.append(" ".join(f"{name} {value / GB:.2f} GB" for name, value in numbers.items()))
        torch.cuda.reset_peak_memory_stats()
    if (free := free_bytes()) is not None:
        lines.append(f"CPU memory that is free: {free / GB:.2f} GB")
    sys.stdout.write("\n".join(lines) + "\n")
    sys.stdout.flush()


def estimate_zero3_model_states_mem_needs_all_cold(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> None:
    """Print what a GPU needs, and a node's CPU with offload: the shards, times a factor.

    For each weight the ranks have 16 bytes: of an fp32 weight, its gradient and two moments.
    Computing takes 2 for each weight that is gathered: all at stage 2, the largest layer's at 3.
    """
    of_node = SHARD_BYTES * total_params / num_nodes
    compute = COMPUTE_BYTES * largest_layer_params
    sys.stdout.write(
        f"{total_params / 1e6:.0f}M weights on {num_nodes} x {num_gpus_per_node} GPUs, of each\n"
        f"{(compute + of_node / num_gpus_per_node) / GB:.2f} GB; with offload_optimizer "
        f"{compute / GB:.2f} GB, and {of_node * additional_buffer_factor / GB:.2f} GB of each CPU\n"
    )


def estimate_zero2_model_states_mem_needs_all_cold(total_params: int, *more: int, **k: int) -> None:
    """Print the same at stage 2, for numbers of GPUs per node and nodes."""
    estimate_zero3_model_states_mem_needs_all_cold(total_params, total_params, *more, **k)


def _all_live(model: nn.Module, *more: int, stage: int, **k: int) -> None:
    total = sum(each.numel() for each in model.parameters())
    layers = ([*module.parameters(recurse=False)] for module in model.modules())
    largest = total if stage == 2 else max(sum(each.numel() for each in own) for own in layers)
    estimate_zero3_model_states_mem_needs_all_cold(total, largest, *more, **k)


estimate_zero2_model_states_mem_needs_all_live = partial(_all_live, stage=2)
estimate_zero3_model_states_mem_needs_all_live = partial(_all_live, stage=3)
