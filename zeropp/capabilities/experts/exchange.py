"""Expert parallelism's two exchanges: dispatch to the ranks of the experts, and combine.

A rank sends each expert's rows to the rank that has the expert (`dispatch`), and gets the experts'
outputs back (`combine`), in its own order. How many rows go where is known only when the
router has decided, so the numbers cross first; the host waits for them once in a layer.

    rows of a rank, by expert  ->  rows of all ranks, by rank  ->  by own expert  ->  back

Source: GShard (Lepikhin et al. 2020), section 3.2; here without padding.
T tokens times experts of each on a rank, M rows that arrive, H hidden, E experts, P ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zeropp.wire.rank_group import RankGroup


@dataclass(frozen=True, kw_only=True)
class Dispatched:
    """Rows [M, H] by this rank's experts, the number of each int64 [E/P], and where they are from.

    order: of each row its place among those that arrived, by ranks. sent, received: rows to and
    from each rank.
    """

    rows: Tensor
    counts: Tensor
    order: Tensor
    sent: Sequence[int]
    received: Sequence[int]


@torch.compiler.disable  # it enters what is sent into a ledger, each time
def dispatch(rows: Tensor, counts: Tensor, group: RankGroup) -> Dispatched:
    """Send `rows` [T, H], by expert, of which each expert gets as many as `counts` [E] says.

    Each of the group has as many of the E experts as the others.
    """
    sent = counts.view(group.size, -1)
    received = torch.empty_like(sent)
    group.all_to_all(received, sent)
    splits = [numbers.sum(1).tolist() for numbers in (sent, received)]
    arrived = _Exchanged.apply(rows, *splits, group)
    experts = torch.arange(sent.shape[1], device=rows.device).repeat(group.size)
    order = experts.repeat_interleave(received.flatten()).argsort(stable=True)
    return Dispatched(
        rows=_Permuted.apply(arrived, order),
        counts=received.sum(0),
        order=order,
        sent=splits[0],
        received=splits[1],
    )


@torch.compiler.disable
def combine(rows: Tensor, dispatched: Dispatched, group: RankGroup) -> Tensor:
    """Send the experts' outputs [M, H] back; return them [T, H] in dispatch order."""
    by_rank = _Permuted.apply(rows, dispatched.order.argsort())
    return _Exchanged.apply(by_rank, dispatched.received, dispatched.sent, group)


class _Exchanged(torch.autograd.Function):
    """Rows [M, H] that arrive, `received` from each rank, for rows [T, H], `sent` to each."""

    @staticmethod
    def forward(
        ctx, rows: Tensor, sent: Sequence[int], received: Sequence[int], group: RankGroup
    ) -> Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return group.exchange_rows(rows, sent, received)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        back = _Exchanged.apply(gradient, ctx.received, ctx.sent, ctx.group)
        return back, None, None, None


class _Permuted(torch.autograd.Function):
    """Rows in another order: the backward pass needs no sum, as autograd's indexing does."""

    @staticmethod
    def forward(ctx, rows: Tensor, order: Tensor) -> Tensor:
        ctx.save_for_backward(order)
        return rows[order]

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        (order,) = ctx.saved_tensors
        return gradient[order.argsort()], None
