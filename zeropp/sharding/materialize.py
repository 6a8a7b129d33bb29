"""Memory for tensors that `zeropp.zero.Init` recorded: one tensor at a time, shard by shard.

`recorded_as_meta` puts meta tensors in their places, which sharding accepts. Then it materializes
each tensor on the first rank and broadcasts it, and every rank keeps its shard. No rank holds more
than its shards and one whole tensor, and all ranks hold the same model.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from zeropp.fsdp_adapter import inherit
from zeropp.sharding.recorded_tensor import RECORDED_ATTRIBUTES, RecordedTensor

HOST = torch.device("cpu")
Owners = tuple[tuple[nn.Module, str], ...]  # modules that hold a tensor, and its name in each


@contextmanager
def recorded_as_meta(
    model: nn.Module, group: dist.ProcessGroup | None, device: torch.device
) -> Iterator[None]:
    """Replace recorded tensors by meta tensors inside; afterwards materialize them on the device.

    All ranks of `group` use it. After an exception they stay meta tensors.
    """
    owners_of = _tensors_where(model, lambda tensor: isinstance(tensor, RecordedTensor))
    replaced: dict[RecordedTensor, Owners] = {}
    for recorded, owners in owners_of.items():
        meta = torch.empty_strided(
            recorded.size(), recorded.stride(), dtype=recorded.dtype, device="meta"
        )
        replaced[_put(_as_parameter_like(recorded, meta), owners)] = owners
    yield
    for recorded, owners in replaced.items():
        whole = _broadcast_materialized(recorded, group, device)
        module, name = owners[0]
        shard = _shard_like(getattr(module, name), whole)
        _put(_as_parameter_like(recorded, shard), owners)


def allocate_meta_tensors(
    model: nn.Module, device_of: Callable[[torch.Tensor], torch.device]
) -> None:
    """Replace meta tensors by uninitialized ones on the devices that `device_of` returns."""
    for tensor, owners in _tensors_where(model, lambda tensor: tensor.is_meta).items():
        empty = torch.empty_like(tensor, device=device_of(tensor))
        _put(_as_parameter_like(tensor, empty), owners)


def master_devices(
    parameters: Sequence[nn.Parameter], ratio: float, device: torch.device
) -> Iterator[torch.device]:
    """Yield the host for parameters that fit into `ratio` of all elements, else `device`."""
    sizes = [parameter.numel() for parameter in parameters]
    left = math.ceil(ratio * sum(sizes))
    for size in sizes:
        fits = size <= left
        left -= size if fits else 0
        yield HOST if fits else device


def copy_from_first_rank(
    model: nn.Module, group: dist.ProcessGroup | None, device: torch.device
) -> None:
    """Give every rank the first rank's values of the parameters and buffers that have values."""
    if group is None or group.size() == 1:
        return
    tensors = dict.fromkeys((*model.parameters(), *model.buffers()))
    with torch.no_grad():
        for tensor in tensors:
            if not isinstance(tensor, RecordedTensor | DTensor) and not tensor.is_meta:
                sent = tensor.detach().to(device).contiguous()
                _broadcast(sent, group)
                if sent.data_ptr() != tensor.data_ptr():
                    tensor.copy_(sent)


def is_whole(tensor: DTensor) -> bool:
    """Whether every rank has all of a tensor."""
    axes = enumerate(tensor.placements)
    return all(placement.is_replicate() or tensor.device_mesh.size(n) == 1 for n, placement in axes)


def part_for_rank(whole: torch.Tensor, like: DTensor) -> torch.Tensor:
    """Return this rank's part of `whole`, sharded as `like`: a view where possible."""
    sharded = distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)
    return sharded.to_local()


def _broadcast_materialized(
    recorded: RecordedTensor, group: dist.ProcessGroup | None, device: torch.device
) -> torch.Tensor:
    """Return the tensor on every rank; only the first one replays the tape."""
    if group is None or dist.get_rank(group) == 0:
        whole = recorded.materialize().contiguous().to(device)
    else:
        whole = torch.empty(recorded.shape, dtype=recorded.dtype, device=device)
    if group is not None and group.size() > 1:
        _broadcast(whole, group)
    return whole


def _broadcast(tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
    if tensor.numel():
        dist.broadcast(tensor, src=dist.get_global_rank(group, 0), group=group)


def _shard_like(placeholder: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of `whole`, or all of it where the placeholder is not sharded."""
    if not isinstance(placeholder, DTensor):
        return whole
    return DTensor.from_local(
        part_for_rank(whole, placeholder).clone(),
        placeholder.device_mesh,
        placeholder.placements,
        run_check=False,
        shape=placeholder.shape,
        stride=placeholder.stride(),
    )


def _as_parameter_like(original: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    if not isinstance(original, nn.Parameter):
        return tensor
    parameter = nn.Parameter(tensor, requires_grad=original.requires_grad)
    inherit(parameter, original)
    for name in RECORDED_ATTRIBUTES:
        vars(parameter).pop(name, None)
    return parameter


def _put(tensor: torch.Tensor, owners: Owners) -> torch.Tensor:
    """Let modules hold a tensor in the place of another one; return what they held.

    A buffer is swapped in place, so that it stays persistent or not; for a copy, since a thread of
    the process group may still hold what it has broadcast, which torch does not swap.
    """
    module, name = owners[0]
    if isinstance(tensor, nn.Parameter):
        held = module.get_parameter(name)
        for module, name in owners:
            module.register_parameter(name, tensor)
        return held
    copy = tensor.clone()
    torch.utils.swap_tensors(module.get_buffer(name), copy)
    return copy


def _tensors_where(
    model: nn.Module, condition: Callable[[torch.Tensor], bool]
) -> dict[torch.Tensor, Owners]:
    """Return the parameters and buffers that fulfil a condition; tied ones have several owners."""
    owners: dict[torch.Tensor, Owners] = {}
    own = {"recurse": False, "remove_duplicate": False}
    for module in model.modules():
        for name, tensor in (*module.named_parameters(**own), *module.named_buffers(**own)):
            if condition(tensor):
                owners[tensor] = (*owners.get(tensor, ()), (module, name))
    return owners
