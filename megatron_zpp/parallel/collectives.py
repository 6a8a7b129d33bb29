"""What ranks that share samples send each other: rows gathered, terms summed, heads exchanged.

Gathers and sums are each other's backward. Sums are taken in fp32 and in the order of the ranks,
whatever is sent, and are the same on all ranks (docs/adr/0002). Shapes: B batch, S sequence,
H hidden, N heads of D channels, T ranks.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from zeropp.wire.tokens.peers import Peers

Move = Callable[[Tensor, Peers], Tensor]


def keep(x: Tensor, peers: Peers) -> Tensor:
    """Return x; its backward may be a sum."""
    return x.view_as(x)


def sum_whole(x: Tensor, peers: Peers) -> Tensor:
    """Return the sum over ranks of x, of any shape."""
    size, flat = peers.size, x.reshape(-1)
    padded = F.pad(flat, (0, -len(flat) % size)).view(size, -1)
    return _gather(_sum_parts(padded, peers), peers).view(-1)[: len(flat)].view(x.shape)


def largest(x: Tensor, peers: Peers) -> Tensor:
    """Return the largest of each element of x over the ranks."""
    peers.maximize(x)
    return x


def gather_rows(x: Tensor, peers: Peers) -> Tensor:
    """Return the rows [B, S, H] of all ranks, which have [B, S/T, H] each."""
    return _gather(x, peers).transpose(0, 1).flatten(1, 2)


def sum_rows(x: Tensor, peers: Peers) -> Tensor:
    """Return this rank's rows [B, S/T, H] of the sum over ranks of x [B, S, H]."""
    return _sum_parts(x.unflatten(1, (peers.size, -1)).transpose(0, 1), peers)


def own_rows(x: Tensor, peers: Peers) -> Tensor:
    """Return this rank's rows [B, S/T, H] of x [B, S, H], the same on all ranks."""
    return x.chunk(peers.size, dim=1)[peers.place].clone()


def gather_columns(x: Tensor, peers: Peers) -> Tensor:
    """Return the columns [..., V] of all ranks, which have [..., V/T] each."""
    return _gather(x, peers).movedim(0, -2).flatten(-2)


def sum_columns(x: Tensor, peers: Peers) -> Tensor:
    """Return this rank's columns [..., V/T] of the sum over ranks of x [..., V]."""
    return _sum_parts(x.unflatten(-1, (peers.size, -1)).movedim(-2, 0), peers)


def rows_of_own_heads(x: Tensor, peers: Peers) -> Tensor:
    """Return all rows [B, S, N/T, D] of this rank's heads; each has [B, S/T, N, D] of all heads."""
    parts = x.unflatten(2, (peers.size, -1)).movedim(2, 0)
    return _exchange(parts, peers).transpose(0, 1).flatten(1, 2)


def heads_of_own_rows(x: Tensor, peers: Peers) -> Tensor:
    """Return all heads [B, S/T, N, D] of this rank's rows; the opposite of `rows_of_own_heads`."""
    parts = x.unflatten(1, (peers.size, -1)).transpose(0, 1)
    return _exchange(parts, peers).movedim(0, 2).flatten(2, 3)


@torch.compiler.disable  # it enters what is sent into a ledger, each time
def moved(x: Tensor, peers: Peers, forward: Move, backward: Move) -> Tensor:
    """Return `forward(x, peers)`, whose gradient is passed on by `backward`."""
    return _Moved.apply(x, peers, forward, backward)


class _Moved(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, peers: Peers, forward: Move, backward: Move) -> Tensor:
        ctx.peers, ctx.backward_move = peers, backward
        return forward(x, peers)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.backward_move(gradient, ctx.peers), None, None, None


def _gather(part: Tensor, peers: Peers) -> Tensor:
    """Return the parts of all ranks, [T, ...]."""
    whole = part.new_empty(peers.size, *part.shape)
    peers.gather(part, whole)
    return whole


def _sum_parts(parts: Tensor, peers: Peers) -> Tensor:
    """Return the sum over ranks of this rank's part of `parts` [T, ...]."""
    return _exchange(parts, peers).float().sum(0).to(parts.dtype)


def _exchange(parts: Tensor, peers: Peers) -> Tensor:
    """Send part i of `parts` [T, ...] to rank i; return what arrives, in the order of senders."""
    parts = parts.contiguous()
    received = torch.empty_like(parts)
    peers.exchange(parts, received)
    return received
