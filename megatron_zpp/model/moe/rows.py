"""Rows of tokens in the order of pairs, and back: a pair is of a token and an expert, or a node.

Pair p of T tokens with K partners each is of token p / K. No sum is taken by atomic additions:
those of a token's rows are in the order of its partners, and so the same in each run.
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


def _at_places(rows: Tensor, places: Tensor, num: int) -> Tensor:
    """Return `num` rows, of which those at `places` [M] are `rows` [M, H], and the others zeros."""
    is_full = len(places) == num
    whole = (torch.empty if is_full else torch.zeros)(
        (num, rows.shape[1]), dtype=rows.dtype, device=rows.device
    )
    whole[places] = rows
    return whole
