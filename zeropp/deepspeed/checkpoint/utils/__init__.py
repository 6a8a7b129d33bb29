"""`deepspeed.checkpoint.utils`: a state dict as plain tensors on one device."""

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from zeropp.fsdp_adapter import gather_whole


def clone_tensors_for_torch_save(item: Any, device: torch.device | str = "cpu") -> Any:
    """Return `item` with copies of its tensors on `device`; dicts, lists and tuples are copied too.

    Equal views of one storage, such as tied weights, become one tensor (on a rank without elements
    of it, two). Sharded tensors are
    gathered, so all ranks must call this.
    """
    return _clone(item, torch.device(device), {})


def _clone(item: Any, device: torch.device, copies: dict[tuple, torch.Tensor]) -> Any:
    if isinstance(item, torch.Tensor):
        whole = gather_whole(item) if isinstance(item, DTensor) else item  # on all ranks alike
        return copies.setdefault(_place(item), whole.detach().to(device, copy=True))
    if isinstance(item, dict):
        return type(item)((key, _clone(value, device, copies)) for key, value in item.items())
    if isinstance(item, list | tuple):
        return type(item)(_clone(value, device, copies) for value in item)
    return item


def _place(tensor: torch.Tensor) -> tuple:
    """What is the same for two tensors only if they are the same memory, seen the same way."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    if not local.numel():
        return (id(tensor),)
    return (local.device, local.data_ptr(), local.dtype, tensor.shape, tensor.stride())
