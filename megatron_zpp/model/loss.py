"""The output layer and its cross-entropy in one step, so that the logits exist only once.

The logits are turned in place, a few rows at a time while they are in cache, into their own
gradient; no second buffer of their size and no fp32 copy of 16-bit logits is ever made.
Legend of the shapes: T tokens, H hidden, V padded vocabulary.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

CPU_CHUNK = 2**18  # logits worked on at a time: 1 MiB in fp32 stays in a core's cache
DEVICE_CHUNK = 2**25  # elsewhere: 128 MiB of workspace, few enough kernel launches


CrossEntropy = Callable[[Tensor, Tensor, Tensor], Tensor]
Turn = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def head_loss(
    hidden: Tensor, weight: Tensor, labels: Tensor, mask: Tensor,
    cross_entropy: CrossEntropy | None = None,
) -> Tensor:  # fmt: skip
    """Mean cross-entropy Σ(loss·mask)/Σmask of logits hidden·weightᵀ, an fp32 scalar.

    hidden [T, H], weight [V, H], labels int64 [T] below V, mask [T]. Zero if the mask is all zero.
    Losses and softmax are computed in fp32 whatever the dtype. Differentiable once, by
    `cross_entropy`: `by_rows` if None, or `at_once`.
    """
    mask = mask.float()
    if torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad):
        return _HeadLoss.apply(hidden, weight, labels, mask, cross_entropy or by_rows)
    losses = by_rows(F.linear(hidden, weight), labels, None)
    return torch.dot(losses, mask) / _count(mask)


def by_rows(logits: Tensor, labels: Tensor, mask: Tensor | None) -> Tensor:
    """Losses fp32 [T]; with a mask, logits [T, V] become mask · (softmax − one-hot) in place."""
    size = CPU_CHUNK if logits.device.type == "cpu" else DEVICE_CHUNK
    rows = max(1, size // logits.shape[1])
    losses = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    for first in range(0, len(logits), rows):
        part = slice(first, first + rows)
        wanted = labels[part, None]  # [rows, 1]
        wide = logits[part].float()  # for fp32 a view: what follows is in place
        shift = wide.amax(dim=1, keepdim=True)
        target = wide.gather(1, wanted)
        if mask is None:
            total = (wide - shift).exp_().sum(dim=1, keepdim=True)
        else:
            total = wide.sub_(shift).exp_().sum(dim=1, keepdim=True)
            scale = mask[part, None]
            wide.mul_(scale / total).scatter_add_(1, wanted, -scale)
            if wide.dtype != logits.dtype:
                logits[part] = wide
        losses[part] = (total.log() + (shift - target)).squeeze(1)
    return losses


def at_once(logits: Tensor, labels: Tensor, mask: Tensor, turn: Turn | None = None) -> Tensor:
    """What `by_rows` does with a mask, by `turn`, `turn_logits` if None, which one may compile.

    Compiled it needs no memory but the losses; as it stands, some copies of the logits in fp32.
    """
    wanted = labels[:, None]
    # Outside of what is compiled: torch 2.11 would look after the logits have been overwritten.
    target = logits.gather(1, wanted).float()
    return (turn or turn_logits)(logits, wanted, target, mask)


def turn_logits(logits: Tensor, wanted: Tensor, target: Tensor, mask: Tensor) -> Tensor:
    """Losses fp32 [T]; logits [T, V] become their gradient in place.

    wanted [T, 1]; target fp32 [T, 1], the logits of these; mask [T]. One kernel of torch.compile's.
    """
    wide = logits.float()
    shift = wide.amax(dim=1, keepdim=True)
    total = (wide - shift).exp().sum(dim=1, keepdim=True)
    columns = torch.arange(logits.shape[1], device=logits.device)
    softmax = (wide - shift).exp() / total
    logits.copy_(mask[:, None] * (softmax - (columns == wanted).float()))
    return (total.log() + (shift - target)).squeeze(1)


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, hidden: Tensor, weight: Tensor, labels: Tensor, mask: Tensor,
        cross_entropy: CrossEntropy,
    ) -> Tensor:  # fmt: skip
        logits = F.linear(hidden, weight)  # [T, V]
        losses = cross_entropy(logits, labels, mask)
        count = _count(mask)
        ctx.save_for_backward(logits, hidden, weight, count)
        return torch.dot(losses, mask) / count

    @staticmethod
    def backward(ctx, upstream: Tensor) -> tuple[Tensor | None, ...]:
        gradient, hidden, weight, count = ctx.saved_tensors
        gradient.mul_(upstream / count)  # in place: a second backward pass is refused by autograd
        for_hidden = for_weight = None
        if ctx.needs_input_grad[0]:
            for_hidden = (gradient @ weight.to(gradient.dtype)).to(hidden.dtype)
        if ctx.needs_input_grad[1]:
            for_weight = (gradient.t() @ hidden.to(gradient.dtype)).to(weight.dtype)
        return for_hidden, for_weight, None, None, None


def _count(mask: Tensor) -> Tensor:
    return mask.sum().clamp(min=torch.finfo(torch.float32).tiny)
