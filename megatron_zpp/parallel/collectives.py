"""What ranks that share samples send each other: rows gathered, terms summed, heads exchanged.

Gathers and sums are each other's backward. Sums are taken in fp32 and in the order of the ranks,
whatever is sent, and are the same on all ranks (docs/adr/0002). Shapes: B batch, S sequence,
H hidden, N heads of D channels, T ranks.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from zeropp.wire import RankGroup

Move = Callable[[Tensor, RankGroup], Tensor]


def keep(x: Tensor, group: RankGroup) -> Tensor:
    """Return x; its backward may be a sum."""
    return x.view_as(x)


def sum_whole(x: Tensor, group: RankGroup) -> Tensor:
    """Return the sum over ranks of x, of any shape."""
    size, flat = group.size, x.reshape(-1)
    padded = F.pad(flat, (0, -len(flat) % size)).view(size, -1)
    return _gather(_sum_parts(padded, group), group).view(-1)[: len(flat)].view(x.shape)


def largest(x: Tensor, group: RankGroup) -> Tensor:
    """Return the largest of each element of x over the ranks."""
    group.maximize(x)
    return x


def gather_rows(x: Tensor, group: RankGroup) -> Tensor:
    """Return the rows [B, S, H] of all ranks, which have [B, S/T, H] each."""
    return _gather(x, group).transpose(0, 1).flatten(1, 2)


def sum_rows(x: Tensor, group: RankGroup) -> Tensor:
    """Return this rank's rows [B, S/T, H] of the sum over ranks of x [B, S, H]."""
    return _sum_parts(x.unflatten(1, (group.size, -1)).transpose(0, 1), group)


def own_rows(x: Tensor, group: RankGroup) -> Tensor:
    """Return this rank's rows [B, S/T, H] of x [B, S, H], the same on all ranks."""
    return x.chunk(group.size, dim=1)[group.index].clone()


def gather_columns(x: Tensor, group: RankGroup) -> Tensor:
    """Return the columns [..., V] of all ranks, which have [..., V/T] each."""
    return _gather(x, group).movedim(0, -2).flatten(-2)


def sum_columns(x: Tensor, group: RankGroup) -> Tensor:
    """Return this rank's columns [..., V/T] of the sum over ranks of x [..., V]."""
    return _sum_parts(x.unflatten(-1, (group.size, -1)).movedim(-2, 0), group)


def rows_of_own_heads(x: Tensor, group: RankGroup) -> Tensor:
    """Return all rows [B, S, N/T, D] of this rank's heads; each has [B, S/T, N, D] of all heads."""
    parts = x.unflatten(2, (group.size, -1)).movedim(2, 0)
    return _exchange(parts, group).transpose(0, 1).flatten(1, 2)


def heads_of_own_rows(x: Tensor, group: RankGroup) -> Tensor:
    """Return all heads [B, S/T, N, D] of this rank's rows; the opposite of `rows_of_own_heads`."""
    parts = x.unflatten(1, (group.size, -1)).transpose(0, 1)
    return _exchange(parts, group).movedim(0, 2).flatten(2, 3)


@torch.compiler.disable  # it enters what is sent into a ledger, each time
def moved(x: Tensor, group: RankGroup, forward: Move, backward: Move) -> Tensor:
    """Return `forward(x, group)`, whose gradient is passed on by `backward`."""
    return _Moved.apply(x, group, forward, backward)


class _Moved(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, group: RankGroup, forward: Move, backward: Move) -> Tensor:
        ctx.group, ctx.backward_move = group, backward
        return forward(x, group)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.backward_move(gradient, ctx.group), None, None, None


def _gather(part: Tensor, group: RankGroup) -> Tensor:
    """Return the parts of all ranks, [T, ...]."""
    whole = part.new_empty(group.size, *part.shape)
    group.all_gather(whole.view(-1), part.contiguous().view(-1))
    return whole


def _sum_parts(parts: Tensor, group: RankGroup) -> Tensor:
    """Return the sum over ranks of this rank's part of `parts` [T, ...]."""
    return _exchange(parts, group).float().sum(0).to(parts.dtype)


def _exchange(parts: Tensor, group: RankGroup) -> Tensor:
    """Send part i of `parts` [T, ...] to rank i; return what arrives, in the order of senders."""
    parts = parts.contiguous()
    received = torch.empty_like(parts)
    group.all_to_all(received, parts)
    return received
