"""`zeropp.zero`: the two context managers of DeepSpeed's ZeRO-3, over FSDP2's shards.

with zeropp.zero.Init():
    model = Net()                                   # no memory yet, however large
engine, *_ = zeropp.initialize(model=model, config=...)

with zeropp.zero.GatheredParameters(model.head.weight, modifier_rank=0):
    if engine.global_rank == 0:
        torch.nn.init.zeros_(model.head.weight)     # whole here, written back to the shards
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from zeropp.errors import InputError
from zeropp.settings.zero_config import ZeroConfig
from zeropp.sharding.materialize import part_for_rank
from zeropp.sharding.recorded_tensor import recording
from zeropp.sharding.weight_changes import notify_weights_written

_NOT_HERE = {
    "module": "build the model inside the context, or give the finished one to zeropp.initialize",
    "data_parallel_group": "the ranks are known when zeropp.initialize or zeropp.shard is called",
    "remote_device": "the JSON's offload_param says where shards live",
    "pin_memory": "the JSON's offload_optimizer and offload_param have a pin_memory each",
    "dtype": "the shards are fp32 and computed with in the JSON's format",
    "mpu": "there are no tensor-parallel ranks",
}


@contextmanager
def Init(  # noqa: N802  (DeepSpeed's name)
    module: nn.Module | None = None,
    *,
    enabled: bool = True,
    config_dict_or_path: Mapping | Path | str | None = None,
    config: Mapping | Path | str | None = None,
    **others: Any,
) -> Iterator[None]:
    """Build a model without giving it memory; `zeropp.initialize` and `zeropp.shard` do.

    Whatever initializes the parameters is written down and done later, one parameter at a time,
    on the first rank, with the random numbers it would have drawn here; each rank keeps its shard
    only. Raises InputError for arguments that have no meaning here, and for code that must know a
    value that does not exist yet.
    """
    for name, value in {"module": module, **others}.items():
        if name not in _NOT_HERE:
            raise InputError(f"zeropp.zero.Init has no argument {name}")
        if value not in (None, False):
            raise InputError(f"zeropp.zero.Init({name}={value!r:.60}): {_NOT_HERE[name]}")
    given = config if config is not None else config_dict_or_path
    if given is not None:
        ZeroConfig.from_json(given)
    with recording() if enabled else nullcontext():
        yield


@contextmanager
def GatheredParameters(  # noqa: N802  (DeepSpeed's name)
    params: torch.Tensor | Iterable[torch.Tensor],
    modifier_rank: int | None = None,
    fwd_module: nn.Module | None = None,
    enabled: bool = True,
) -> Iterator[None]:
    """Make sharded parameters whole, in their own place, on every rank; all ranks enter together.

    With `modifier_rank` that rank's changes are sent to all and written back into the shards;
    without it changes are discarded. Parameters that are not sharded stay as they are. `fwd_module`
    is accepted and not needed. No forward pass may run inside. Raises InputError for a rank that
    does not exist and for what is no tensor.
    """
    listed = [params] if isinstance(params, torch.Tensor) else list(params)
    for one in listed:
        if not isinstance(one, torch.Tensor):
            raise InputError(f"GatheredParameters takes parameters, not {type(one).__name__}")
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    if modifier_rank is not None and not 0 <= modifier_rank < ranks:
        raise InputError(f"modifier_rank = {modifier_rank}: expected a rank from 0 to {ranks - 1}")
    sharded = [one for one in dict.fromkeys(listed) if enabled and isinstance(one, DTensor)]
    others = []
    try:
        for one in sharded:
            whole = _whole(one)
            torch.utils.swap_tensors(one, whole)  # what was `one` everywhere is whole now
            others.append(whole)
        yield
    finally:
        for one, other in zip(sharded, others, strict=False):
            torch.utils.swap_tensors(one, other)
    if modifier_rank is not None:
        _write_back(sharded, others, modifier_rank)


class _Whole(torch.Tensor):
    """A plain tensor in a class that can take a DTensor's place: it has the same slots."""

    __slots__ = tuple(DTensor.__slots__)
    __torch_function__ = torch._C._disabled_torch_function_impl


def _whole(parameter: DTensor) -> torch.Tensor:
    with torch.no_grad():
        values = parameter.detach().full_tensor()
        if values.untyped_storage().data_ptr() == parameter.to_local().untyped_storage().data_ptr():
            values = values.clone()
    whole = torch.Tensor._make_subclass(_Whole, values, parameter.requires_grad)
    if isinstance(parameter, nn.Parameter):
        whole._is_param = True  # what makes isinstance(whole, nn.Parameter) true
    return whole


def _write_back(sharded: list[DTensor], wholes: list[torch.Tensor], modifier_rank: int) -> None:
    """Send each whole tensor from the rank that changed it, and keep this rank's rows."""
    with torch.no_grad():
        for parameter, whole in zip(sharded, wholes, strict=True):
            values = whole.detach().as_subclass(torch.Tensor).contiguous()
            dist.broadcast(values, src=modifier_rank)
            parameter.to_local().copy_(part_for_rank(values, parameter))
    if sharded:
        notify_weights_written(sharded)
