"""Tensors that were written down by `zeropp.zero.Init` get memory: one at a time, shard by shard.

`set_aside` leaves tensors of the meta device in their places, which any sharding takes; `fill`
then makes each on the first rank, sends it to the others, and every rank keeps its shard. No rank
holds more than its shards and one whole tensor, and all ranks hold the same model.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from zeropp.sharding.recorded_tensor import RecordedTensor

Places = tuple[tuple[nn.Module, str], ...]  # where one tensor hangs in a model; several if tied


def set_aside(model: nn.Module) -> Mapping[RecordedTensor, Places]:
    """Put meta tensors in the places of deferred ones; return these, to be filled afterwards."""
    found = _places(model, lambda one: isinstance(one, RecordedTensor))
    for deferred, places in found.items():
        meta = torch.empty_strided(
            deferred.size(), deferred.stride(), dtype=deferred.dtype, device="meta"
        )
        _put(_like(deferred, meta), places)
    return found


def fill(
    waiting: Mapping[RecordedTensor, Places], group: dist.ProcessGroup | None, device: torch.device
) -> None:
    """Make every tensor that was set aside; all ranks of `group` call it alike."""
    for deferred, places in waiting.items():
        whole = _made_on_first(deferred, group, device)
        module, name = places[0]
        _put(_like(deferred, _part_of(whole, getattr(module, name))), places)


def make_room(model: nn.Module, place: Callable[[torch.Tensor], torch.device]) -> None:
    """Give meta tensors memory without values, on the device that `place` names for each."""
    for tensor, places in _places(model, lambda one: one.is_meta).items():
        _put(_like(tensor, torch.empty_like(tensor, device=place(tensor))), places)


def copy_from_first_rank(model: nn.Module, group: dist.ProcessGroup | None, device: torch.device) -> None:
    """Give every rank the first rank's values of the parameters and buffers that have some."""
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


def part_for_rank(whole: torch.Tensor, like: DTensor) -> torch.Tensor:
    """This rank's rows of `whole` as `like` is split: a view where it can be one."""
    split = distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)
    return split.to_local()


def _made_on_first(
    deferred: RecordedTensor, group: dist.ProcessGroup | None, device: torch.device
) -> torch.Tensor:
    first = group is None or dist.get_rank(group) == 0
    if first:
        whole = deferred.made().contiguous().to(device)
    else:
        whole = torch.empty(deferred.shape, dtype=deferred.dtype, device=device)
    if group is not None and group.size() > 1:
        _broadcast(whole, group)
    return whole


def _broadcast(tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
    if tensor.numel():
        dist.broadcast(tensor, src=dist.get_global_rank(group, 0), group=group)


def _part_of(whole: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    if not isinstance(place, DTensor):
        return whole
    part = part_for_rank(whole, place).clone()
    spec = {"shape": place.shape, "stride": place.stride()}
    return DTensor.from_local(part, place.device_mesh, place.placements, run_check=False, **spec)


def _like(other: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    if isinstance(other, nn.Parameter):
        return nn.Parameter(tensor, requires_grad=other.requires_grad)
    return tensor


def _put(tensor: torch.Tensor, places: Places) -> None:
    for module, name in places:
        setattr(module, name, tensor)


def _places(
    model: nn.Module, is_wanted: Callable[[torch.Tensor], bool]
) -> dict[torch.Tensor, Places]:
    """Where each wanted parameter and buffer hangs."""
    found: dict[torch.Tensor, Places] = {}
    for module in model.modules():
        for name, tensor in _own_tensors(module):
            if is_wanted(tensor):
                found[tensor] = (*found.get(tensor, ()), (module, name))
    return found


def _own_tensors(module: nn.Module) -> Sequence[tuple[str, torch.Tensor]]:
    several = {"recurse": False, "remove_duplicate": False}
    return [*module.named_parameters(**several), *module.named_buffers(**several)]
