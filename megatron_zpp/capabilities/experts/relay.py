"""One copy of a token for each node that has experts of it, and one sum from each.

Experts that several nodes split are reached by two hops, as weights are by qwZ. Across nodes a
token goes to the rank at the same place there, its relay, which takes it for one of its own: it
sends rows to the ranks of its node (`dispatch`), and sums what comes back, times its
weights. One row crosses back, and the rank of the token adds up those of all nodes.

    rank  ->  relay in each node  ->  ranks with the experts  ->  relay: Σ w y  ->  rank: Σ

Weights travel with a token as fp32, with the numbers of its experts; their gradients travel back
with the token's. Copies for a rank's own node stay where they are. The backward pass makes the same
moves in the opposite order. With `bits` 8, rows that cross towards experts are INT8 codes: tokens,
and the gradients of sums.

T tokens of a rank, K experts of each, H hidden, E experts, m nodes, S copies of a rank's tokens, C
copies that it relays.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from megatron_zpp.capabilities.experts.axis import ExpertAxis
from megatron_zpp.capabilities.experts.routing_record import Assignment
from megatron_zpp.settings.config import ModelConfig
from zeropp.capabilities.experts import RowsOfPairs, RowsOfSomePairs, RowsOfTokens, WeightedSums
from zeropp.quant import RAW, RowLayout, dequantize, quantize, row_layout
from zeropp.wire import RankGroup

COUNT_BYTES = 2 * torch.int64.itemsize  # to each node: how many copies and pairs
ID_DTYPES = (torch.int8, torch.int16, torch.int32)  # of the numbers of a node's experts


@dataclass(frozen=True, kw_only=True)
class Way:
    """How many copies this rank sends to the relay in each node, and how many come from each.

    bits: of a number in rows that cross towards experts.
    """

    group: RankGroup
    sent: Sequence[int]
    received: Sequence[int]
    bits: int

    def to_relays(self, rows: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
        """Return tensors [C, ...] of all ranks' copies, for those of this rank's [S, ...]."""
        bits = (self.bits, *(RAW for _ in others))
        return _moved((rows, *others), bits, self.group, self.sent, self.received)

    def from_relays(self, *columns: Tensor) -> tuple[Tensor, ...]:
        """Return tensors [S, ...] of this rank's copies, for those of all ranks' [C, ...]."""
        bits = (RAW,) * len(columns)
        return _moved(columns, bits, self.group, self.received, self.sent)


@dataclass(frozen=True, kw_only=True)
class Copies:
    """Copies [C, H] of tokens of ranks at this one's place, and the way back.

    weights: fp32 [C, K]. assignment: to the experts of this node, counted from its first; -1 stands
    for others. order: int64 [S], the pairs of this rank's tokens and nodes, in the order of nodes.
    """

    tokens: Tensor
    weights: Tensor
    assignment: Assignment
    order: Tensor
    num_tokens: int
    way: Way

    @cached_property
    def lengths(self) -> Tensor:
        """How many experts of each copy this node has, int64 [C]."""
        return (self.assignment.experts >= 0).sum(1)

    def rows(self) -> Tensor:
        """Return a row for each expert of a copy, [M, H], by expert."""
        order, topk = self.assignment.order, self.weights.shape[1]
        return RowsOfSomePairs.apply(self.tokens, order, self.lengths, topk)


@torch.compiler.disable  # it enters what is sent into a ledger, each time
def send_copies(
    tokens: Tensor, weights: Tensor, assignment: Assignment, axis: ExpertAxis
) -> Copies:
    """Send tokens [T, H] and weights [T, K] to each node that has experts of them.

    The host waits once, for how many copies and pairs there are.
    """
    across = axis.across
    num_nodes, per_node = across.size, len(assignment.counts) // across.size
    numbers, is_needed = _by_node(assignment, num_nodes)
    counts = torch.stack((is_needed.sum(0), (numbers >= 0).sum((0, 2))), dim=1)  # [m, 2]
    arriving = torch.empty_like(counts)
    across.all_to_all(arriving, counts)
    (sent, _), (received, pairs) = torch.stack((counts, arriving)).transpose(1, 2).tolist()
    nodes = torch.arange(num_nodes, device=tokens.device)
    order = torch.where(is_needed, nodes, num_nodes).flatten().argsort(stable=True)[: sum(sent)]
    way = Way(group=across, sent=sent, received=received, bits=axis.bits)
    copies, copied_weights, experts = _ToRelays.apply(
        RowsOfPairs.apply(tokens, order, num_nodes),
        RowsOfPairs.apply(weights.float(), order, num_nodes),
        numbers.flatten(0, 1)[order].to(_id_dtype(per_node)),
        way,
    )
    if across.group is None:  # planned ranks send each other alike numbers, which have values
        experts = numbers.flatten(0, 1)[order]
    return Copies(
        tokens=copies,
        weights=copied_weights,
        assignment=_of_node(experts.long(), per_node, sum(pairs)),
        order=order,
        num_tokens=len(tokens),
        way=way,
    )


@torch.compiler.disable
def return_sums(computed: Tensor, copies: Copies) -> Tensor:
    """Return Σ w y [T, H] for this rank's tokens, of the experts' outputs for all copies.

    computed: [M, H], for the rows of the copies that this rank relays.
    """
    order, num_nodes = copies.assignment.order, copies.way.group.size
    sums = WeightedSums.apply(computed, copies.weights, order, copies.lengths)
    rows = _FromRelays.apply(sums, copies.way)
    by_node = RowsOfTokens.apply(rows, copies.order, copies.num_tokens * num_nodes)
    return by_node.unflatten(0, (copies.num_tokens, num_nodes)).sum(1)


def copy_bytes(
    config: ModelConfig, dtype: torch.dtype, num_nodes: int, bits: int
) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the bytes of a copy on its way to a relay and back, forward, and backward."""
    layout, topk = _layout(config.hidden_size, dtype), config.moe_router_topk
    row = config.hidden_size * dtype.itemsize
    to_relay = row if bits == RAW else layout.packed_bytes
    weights = topk * torch.float32.itemsize
    numbers = topk * _id_dtype(config.num_experts // num_nodes).itemsize
    return (to_relay + weights + numbers, row), (to_relay, row + weights)


class _ToRelays(torch.autograd.Function):
    """Copies and their weights and experts at the relays, [C, ...], for those here, [S, ...]."""

    @staticmethod
    def forward(
        ctx, rows: Tensor, weights: Tensor, experts: Tensor, way: Way
    ) -> tuple[Tensor, ...]:
        ctx.way = way
        moved = way.to_relays(rows, weights, experts)
        ctx.mark_non_differentiable(moved[2])
        return moved

    @staticmethod
    def backward(ctx, rows: Tensor, weights: Tensor, _: None) -> tuple[Tensor | None, ...]:
        return (*ctx.way.from_relays(rows, weights), None, None)


class _FromRelays(torch.autograd.Function):
    """Rows [S, H] of this rank's copies for rows [C, H] of those that it relays."""

    @staticmethod
    def forward(ctx, rows: Tensor, way: Way) -> Tensor:
        ctx.way = way
        return way.from_relays(rows)[0]

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.way.to_relays(gradient)[0], None


def _by_node(assignment: Assignment, num_nodes: int) -> tuple[Tensor, Tensor]:
    """Return the experts of tokens on each node, and whether there are any, bool [T, m].

    Experts are int64 [T, m, K], counted from a node's first; -1 stands for those of other nodes and
    for dropped pairs.
    """
    experts, per_node = assignment.experts, len(assignment.counts) // num_nodes
    nodes = experts // per_node
    if len(assignment.order) < experts.numel():
        is_kept = torch.zeros(experts.numel(), dtype=torch.bool, device=experts.device)
        is_kept[assignment.order] = True
        nodes = torch.where(is_kept.view_as(experts), nodes, num_nodes)
    is_there = nodes[:, None] == torch.arange(num_nodes, device=experts.device)[:, None]
    return torch.where(is_there, (experts % per_node)[:, None], -1), is_there.any(2)


def _of_node(experts: Tensor, num_experts: int, num_pairs: int) -> Assignment:
    """Return the assignment of copies to a node's experts int64 [C, K], of which -1 are none."""
    flat = torch.where(experts < 0, num_experts, experts).flatten()
    ordered, order = flat.sort(stable=True)
    bounds = torch.searchsorted(ordered, torch.arange(num_experts + 1, device=flat.device))
    return Assignment(experts=experts, order=order[:num_pairs], counts=bounds.diff())


def _moved(
    columns: Sequence[Tensor],
    bits: Sequence[int],
    group: RankGroup,
    sent: Sequence[int],
    received: Sequence[int],
) -> tuple[Tensor, ...]:
    """Send rows of tensors, `sent[i]` to peer i, as one message; return the `received` ones.

    Those for this rank itself stay, and are not encoded.
    """
    place = group.index
    sizes = sum(sent[:place]), sent[place], sum(sent[place + 1 :])
    parts = [column.split(sizes) for column in columns]
    encoded = [
        _encoded(torch.cat((before, after)), width)
        for (before, _, after), width in zip(parts, bits, strict=True)
    ]
    crossing = ([*counts[:place], 0, *counts[place + 1 :]] for counts in (sent, received))
    arrived = group.exchange_rows(torch.cat(encoded, dim=1), *crossing)
    first, moved = sum(received[:place]), []
    messages = arrived.split([each.shape[1] for each in encoded], dim=1)
    for (_, own, _), message, width in zip(parts, messages, bits, strict=True):
        others = _decoded(message, own, width)
        moved.append(torch.cat((others[:first], own, others[first:])))
    return tuple(moved)


def _encoded(rows: Tensor, bits: int) -> Tensor:
    """Return rows [N, X] as bytes, uint8 [N, P]."""
    rows = rows.contiguous()
    if bits == RAW:
        return rows.view(torch.uint8)
    return quantize(rows, _layout(rows.shape[1], rows.dtype))


def _decoded(message: Tensor, like: Tensor, bits: int) -> Tensor:
    """Return what uint8 [N, P] stands for, [N, X] of the width and dtype of `like`."""
    message = message.clone(memory_format=torch.contiguous_format)  # at an address of its own
    if bits == RAW:
        return message.view(like.dtype)
    rows = like.new_empty(len(message), like.shape[1])
    dequantize(message, rows, _layout(like.shape[1], like.dtype))
    return rows


def _id_dtype(num_experts: int) -> torch.dtype:
    """Return the smallest dtype of the numbers of a node's experts, and of -1."""
    return next(dtype for dtype in ID_DTYPES if num_experts - 1 <= torch.iinfo(dtype).max)


def _layout(hidden: int, dtype: torch.dtype) -> RowLayout:
    return row_layout((hidden,), (8,), dtype)
