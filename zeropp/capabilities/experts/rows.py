"""Rows of tokens in the order of pairs, and back: a pair is of a token and an expert, or a node.

Pair p of T tokens with K partners each is of token p / K. No sum is taken by atomic additions:
those of a token's rows are in the order of its partners, and so the same in each run. M pairs of
T K exist; where these are few, as on a relay, `RowsOfSomePairs` and `WeightedSums` take no memory
for the others.
"""

import torch
from torch import Tensor


class RowsOfPairs(torch.autograd.Function):
    """Rows [M, H] of tokens [T, H] in the order of pairs; a token's gradients are summed over K."""

    @staticmethod
    def forward(ctx, tokens: Tensor, order: Tensor, num_partners: int) -> Tensor:
        ctx.save_for_backward(order)
        ctx.num_partners, ctx.num_tokens = num_partners, len(tokens)
        return tokens[order // num_partners]

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None, None]:
        (order,) = ctx.saved_tensors
        by_pair = _at_places(gradient, order, ctx.num_tokens * ctx.num_partners)
        by_token = by_pair.unflatten(0, (ctx.num_tokens, ctx.num_partners))
        return by_token.sum(1), None, None


class RowsOfTokens(torch.autograd.Function):
    """Rows [T K, H] by token of rows [M, H] in the order of pairs; zeros for those left out."""

    @staticmethod
    def forward(ctx, rows: Tensor, order: Tensor, num_pairs: int) -> Tensor:
        ctx.save_for_backward(order)
        return _at_places(rows, order, num_pairs)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None, None]:
        (order,) = ctx.saved_tensors
        return gradient[order], None, None


class RowsOfSomePairs(torch.autograd.Function):
    """`RowsOfPairs` of tokens that have `lengths` int64 [T] pairs, for K partners at most."""

    @staticmethod
    def forward(ctx, tokens: Tensor, order: Tensor, lengths: Tensor, num_partners: int) -> Tensor:
        ctx.save_for_backward(order, lengths)
        return tokens[order // num_partners]

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        order, lengths = ctx.saved_tensors
        by_token = gradient[order.argsort()].float()
        return _sums(by_token, lengths).to(gradient.dtype), None, None, None


class WeightedSums(torch.autograd.Function):
    """Σ w y [T, H] of rows y [M, H] in the order of pairs, for weights fp32 [T, K], added in fp32.

    lengths: int64 [T], how many pairs each token has.
    """

    @staticmethod
    def forward(ctx, rows: Tensor, weights: Tensor, order: Tensor, lengths: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weights, order)
        pairs, places = order.sort()
        weighted = rows[places].float() * weights.flatten()[pairs, None]
        return _sums(weighted, lengths).to(rows.dtype)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        rows, weights, order = ctx.saved_tensors
        of_pairs = gradient[order // weights.shape[1]].float()
        of_weights = torch.zeros_like(weights)
        of_weights.view(-1)[order] = (of_pairs * rows).sum(1)
        of_rows = of_pairs * weights.flatten()[order, None]
        return of_rows.to(rows.dtype), of_weights, None, None


def _sums(rows: Tensor, lengths: Tensor) -> Tensor:
    """Return the sums [T, H] of `lengths[0]` rows fp32 [M, H], of the next `lengths[1]` and so on.

    The rows of each sum are added in their order.
    """
    return torch.segment_reduce(rows, "sum", lengths=lengths, axis=0, unsafe=True, initial=0)


def _at_places(rows: Tensor, places: Tensor, num: int) -> Tensor:
    """Return `num` rows, of which those at `places` [M] are `rows` [M, H], and the others zeros."""
    is_full = len(places) == num
    whole = (torch.empty if is_full else torch.zeros)(
        (num, rows.shape[1]), dtype=rows.dtype, device=rows.device
    )
    whole[places] = rows
    return whole
