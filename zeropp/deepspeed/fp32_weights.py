"""The weights of a 16-bit model that are trained become fp32: the optimizer's master weights.

In 16 bit most updates are smaller than half of the distance to the next number, and are rounded
away. DeepSpeed keeps fp32 copies for its optimizer. Here FSDP2's shards are those: they are cast to
the compute format when they are gathered.
"""

import logging
from collections.abc import Iterable

import torch
from torch import nn

HALVES = (torch.bfloat16, torch.float16)
log = logging.getLogger("zeropp")


def use_fp32_weights(model: nn.Module, also: Iterable[torch.Tensor], compute_format: str) -> None:
    """Make fp32, in place, the 16-bit parameters that are trained, and those in `also`.

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
