"""The output layer and its cross-entropy in one step, so that the logits are stored only once.

The logits are overwritten with their own gradient, a few rows at a time while they are in cache.
There is no second buffer of their size, no fp32 copy of 16-bit logits, and backward reads them
only in its two products.
Shapes: T tokens, H hidden, V padded vocabulary.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_zpp.parallel.collectives import largest, sum_whole
from zeropp.wire import RankGroup

CPU_CHUNK = 2**18  # logits computed at a time: 1 MiB in fp32 fits in a core's cache
DEVICE_CHUNK = 2**25  # on other devices: 128 MiB of workspace, few kernel launches


CrossEntropy = Callable[[Tensor, Tensor, Tensor | None], Tensor]
LogitsKernel = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def head_loss(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    mask: Tensor,
    cross_entropy: CrossEntropy | None = None,
    cap: float | None = None,
) -> Tensor:
    """Return the mean cross-entropy Σ(loss·mask)/Σmask of logits hidden·weightᵀ, an fp32 scalar.

    hidden [T, H], weight [V, H], labels int64 [T] below V, mask [T]. The loss is zero if the mask
    is all zero. Losses and softmax are computed in fp32 whatever the dtype. First derivatives only.
    `cross_entropy` is one of the three below; None means `chunked_cross_entropy`.
    With a cap c, logits x are c tanh(x / c).
    """
    mask = mask.float()
    cross_entropy = cross_entropy or chunked_cross_entropy
    if cap is not None:
        cross_entropy = partial(_capped_cross_entropy, cross_entropy, cap)
    if torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad):
        return _HeadLoss.apply(hidden, weight, labels, mask, cross_entropy)
    losses = cross_entropy(F.linear(hidden, weight), labels, None)
    return torch.dot(losses, mask) / _count(mask)


def chunked_cross_entropy(logits: Tensor, labels: Tensor, mask: Tensor | None) -> Tensor:
    """Return losses fp32 [T], computed a few rows at a time.

    With a mask [T], logits [T, V] become mask · (softmax − one-hot) in place.
    """
    chunk_size = CPU_CHUNK if logits.device.type == "cpu" else DEVICE_CHUNK
    num_rows = max(1, chunk_size // logits.shape[1])
    losses = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    for first in range(0, len(logits), num_rows):
        rows = slice(first, first + num_rows)
        label_columns = labels[rows, None]  # [num_rows, 1]
        chunk = logits[rows].float()  # of fp32 logits a view, which is changed in place
        row_max = chunk.amax(dim=1, keepdim=True)
        label_logits = chunk.gather(1, label_columns)
        if mask is None:
            exp_sum = (chunk - row_max).exp_().sum(dim=1, keepdim=True)
        else:
            exp_sum = chunk.sub_(row_max).exp_().sum(dim=1, keepdim=True)
            scale = mask[rows, None]
            chunk.mul_(scale / exp_sum).scatter_add_(1, label_columns, -scale)
            if chunk.dtype != logits.dtype:
                logits[rows] = chunk
        losses[rows] = (exp_sum.log() + (row_max - label_logits)).squeeze(1)
    return losses


def whole_cross_entropy(
    logits: Tensor, labels: Tensor, mask: Tensor | None, kernel: LogitsKernel | None = None
) -> Tensor:
    """Return what `chunked_cross_entropy` returns, with a mask computed for all rows at once.

    `kernel` is `logits_to_gradient`, compiled or not; None means not compiled. Compiled it needs no
    memory but the losses, otherwise several copies of the logits in fp32.
    """
    if mask is None:
        return chunked_cross_entropy(logits, labels, None)
    label_columns = labels[:, None]
    # Outside the kernel: compiled by torch 2.11, it would gather from the overwritten logits.
    label_logits = logits.gather(1, label_columns).float()
    return (kernel or logits_to_gradient)(logits, label_columns, label_logits, mask)


def parallel_cross_entropy(
    logits: Tensor, labels: Tensor, mask: Tensor | None, group: RankGroup
) -> Tensor:
    """Return losses fp32 [T] of logits [T, V/N], the part of the vocabulary of one of N ranks.

    labels int64 [T] count the whole vocabulary. With a mask [T] the logits become
    mask · (softmax − one-hot) in place.
    """
    columns = labels - group.index * logits.shape[1]
    is_own = (columns >= 0) & (columns < logits.shape[1])
    columns = columns.masked_fill(~is_own, 0)[:, None]
    values = logits.float()
    row_max = largest(values.amax(dim=1), group)
    values = values - row_max[:, None]
    label_values = values.gather(1, columns).squeeze(1) * is_own
    exponentials = values.exp_()
    sums = sum_whole(torch.stack((label_values, exponentials.sum(dim=1))), group)
    label_value, exp_sum = sums.unbind()
    if mask is not None:
        exponentials.mul_((mask / exp_sum)[:, None])
        exponentials.scatter_add_(1, columns, -(mask * is_own)[:, None])
        logits.copy_(exponentials)
    return exp_sum.log() - label_value


def logits_to_gradient(
    logits: Tensor, label_columns: Tensor, label_logits: Tensor, mask: Tensor
) -> Tensor:
    """Return losses fp32 [T]; logits [T, V] become their gradient in place.

    label_columns int64 [T, 1]; label_logits fp32 [T, 1]; mask [T]. torch.compile makes it one
    kernel.
    """
    logits_fp32 = logits.float()
    row_max = logits_fp32.amax(dim=1, keepdim=True)
    exp_sum = (logits_fp32 - row_max).exp().sum(dim=1, keepdim=True)
    columns = torch.arange(logits.shape[1], device=logits.device)
    softmax = (logits_fp32 - row_max).exp() / exp_sum
    logits.copy_(mask[:, None] * (softmax - (columns == label_columns).float()))
    return (exp_sum.log() + (row_max - label_logits)).squeeze(1)


def cap_logits(logits: Tensor, cap: float | None) -> Tensor:
    """Return c tanh(logits / c) for a cap c, or the logits without one."""
    return logits if cap is None else cap * torch.tanh(logits / cap)


def _capped_cross_entropy(
    cross_entropy: CrossEntropy, cap: float, logits: Tensor, labels: Tensor, mask: Tensor | None
) -> Tensor:
    """Return what `cross_entropy` does of capped logits, with the gradient of those before the cap.

    With a mask it needs a second buffer of the size of the logits, for the slope of the cap.
    """
    logits.div_(cap).tanh_()
    slope = None if mask is None else 1 - logits.square()
    losses = cross_entropy(logits.mul_(cap), labels, mask)
    if slope is not None:
        logits.mul_(slope)
    return losses


class _HeadLoss(torch.autograd.Function):
    """The loss, whose stored gradient is multiplied by that of the loss after the products.

    The logits hold w (softmax - one-hot), with w = mask / count. In fp16 w = mask, as mask / count
    may be subnormal: the rest of the factor is in the smaller operands then, in fp32.
    """

    @staticmethod
    def forward(
        ctx,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        mask: Tensor,
        cross_entropy: CrossEntropy,
    ) -> Tensor:
        logits = F.linear(hidden, weight)  # [T, V]
        count = _count(mask)
        ctx.divides = logits.dtype == torch.float16
        # The logits now hold their gradient.
        losses = cross_entropy(logits, labels, mask if ctx.divides else mask / count)
        ctx.save_for_backward(logits, hidden, weight, count)
        return torch.dot(losses, mask) / count

    @staticmethod
    @once_differentiable
    def backward(ctx, loss_gradient: Tensor) -> tuple[Tensor | None, ...]:
        logits_gradient, hidden, weight, count = ctx.saved_tensors
        dtype = logits_gradient.dtype
        # [1] and not a scalar, which would be rounded to the products' dtype.
        factor = (loss_gradient / count if ctx.divides else loss_gradient)[None].float()
        hidden_gradient = weight_gradient = None
        if ctx.needs_input_grad[0]:
            hidden_gradient = (logits_gradient @ weight.to(dtype)).mul_(factor).to(hidden.dtype)
        if ctx.needs_input_grad[1]:
            hidden = hidden.to(dtype)
            if ctx.divides:  # a sum over T tokens that is not divided may overflow
                hidden = (hidden * factor).to(dtype)
            weight_gradient = logits_gradient.t() @ hidden
            if not ctx.divides:
                weight_gradient.mul_(factor)
            weight_gradient = weight_gradient.to(weight.dtype)
        return hidden_gradient, weight_gradient, None, None, None


def _count(mask: Tensor) -> Tensor:
    """Return the sum of the mask, or a tiny number instead of zero."""
    return mask.sum().clamp(min=torch.finfo(torch.float32).tiny)
