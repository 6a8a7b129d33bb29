"""The ranks that split the experts of a layer, and the way of tokens to them and back.

In a node, a rank sends each expert's rows to the rank that has the expert (`dispatch`), and gets
back what the experts made of them (`combine`), in its own order. How many rows go where is known
only when the router has decided, so the numbers cross first; the host waits for them once in a
layer.

    rows of a rank, by expert  ->  rows of all ranks, by rank  ->  by own expert  ->  back

Source: GShard (Lepikhin et al. 2020), section 3.2; here without padding.
T tokens times experts of each on a rank, M rows that arrive, H hidden, E experts, P ranks of a
node.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from megatron_zpp.parallel.axes import part_of
from megatron_zpp.parallel.peers import Peers

AXIS_NAMES = ("expert_data", "expert")


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


@dataclass(frozen=True, kw_only=True)
class ExpertAxis:
    """The ranks that each have some experts of each layer, as many as the others.

    `peers` are those of this rank's node, which send each other rows. Where more than a node splits
    the experts, `across` are the ranks at this one's place in all of these nodes, and `bits` those
    of a number in rows that cross to them (model/moe/relay.py).

    Parameters are DTensors on the last axis of `mesh`, the ranks that split the experts; its first
    has the ranks with the same ones, over which ZeRO shards them. Planned ranks have no mesh.
    """

    peers: Peers
    across: Peers | None = None
    bits: int = 16
    mesh: DeviceMesh | None = None

    @property
    def size(self) -> int:
        return self.peers.size * (1 if self.across is None else self.across.size)

    def part(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return this rank's rows of a parameter without values: those of its experts."""
        mesh = None if self.mesh is None else self.mesh[AXIS_NAMES[1]]
        return part_of(parameter, 0, self.size, mesh)

    @torch.compiler.disable  # it enters what is sent into a ledger, each time
    def dispatch(self, rows: Tensor, counts: Tensor) -> Dispatched:
        """Send `rows` [T, H], by expert, of which each expert gets as many as `counts` [E] says.

        E counts the experts of a node.
        """
        sent = counts.view(self.peers.size, -1)
        received = torch.empty_like(sent)
        self.peers.exchange(sent, received)
        splits = [numbers.sum(1).tolist() for numbers in (sent, received)]
        arrived = _Exchanged.apply(rows, *splits, self.peers)
        experts = torch.arange(sent.shape[1], device=rows.device).repeat(self.peers.size)
        order = experts.repeat_interleave(received.flatten()).argsort(stable=True)
        return Dispatched(
            rows=_Permuted.apply(arrived, order),
            counts=received.sum(0),
            order=order,
            sent=splits[0],
            received=splits[1],
        )

    @torch.compiler.disable
    def combine(self, rows: Tensor, dispatched: Dispatched) -> Tensor:
        """Return [T, H], in the order of what was dispatched, of what experts made of it [M, H]."""
        by_rank = _Permuted.apply(rows, dispatched.order.argsort())
        return _Exchanged.apply(by_rank, dispatched.received, dispatched.sent, self.peers)


class _Exchanged(torch.autograd.Function):
    """Rows [M, H] that arrive, `received` from each rank, for rows [T, H], `sent` to each."""

    @staticmethod
    def forward(
        ctx, rows: Tensor, sent: Sequence[int], received: Sequence[int], peers: Peers
    ) -> Tensor:
        ctx.sent, ctx.received, ctx.peers = sent, received, peers
        return peers.exchange_rows(rows, sent, received)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.peers.exchange_rows(gradient, ctx.received, ctx.sent), None, None, None


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
