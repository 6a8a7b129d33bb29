"""Causal attention of the last tokens of a sequence, as where ranks share out its tokens.

PyTorch's kernels for CPUs take causal attention of whole sequences only. A mask for R of S tokens
would be R x S in each layer; here blocks of queries share slices of one mask, in all layers.
Shapes: B rows, N query heads, K key-value heads, D channels of a head.
"""

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from megatron_zpp.model.attention.scores import (
    BLOCK,
    CAUSAL,
    Scores,
    attend_in_blocks,
    with_sink_key,
)


def attend_last(q: Tensor, k: Tensor, v: Tensor, dropout: float, scores: Scores = CAUSAL) -> Tensor:
    """Map q [B, N, R, D] of the last R of S tokens to [B, N, R, D]; k and v [B, K, S, D]."""
    if not scores.is_causal_beside_sinks(k.shape[2]):
        return attend_in_blocks(q, k, v, scores, dropout)
    if scores.sinks is not None:
        length, width, is_whole = q.shape[2], v.shape[-1], q.shape[2] == k.shape[2]
        q, k, v, scores = with_sink_key(q, k, v, scores)
        if is_whole:  # with a query of the new key, there are kernels for whole sequences
            q = F.pad(q, (0, 0, 1, 0))
        return attend_last(q, k, v, dropout, scores)[:, :, -length:, :width]
    options = {"dropout_p": dropout, "enable_gqa": q.shape[1] > k.shape[1], "scale": scores.scale}
    if q.shape[2] == k.shape[2]:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, **options)
    if q.is_cuda:
        mask = causal_lower_right(q.shape[2], k.shape[2])
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, **options)
    return _attend_in_blocks(q, k, v, options)


@torch.compiler.disable
def _attend_in_blocks(q: Tensor, k: Tensor, v: Tensor, options: dict) -> Tensor:
    attended, end = [], k.shape[2] - q.shape[2]
    for block in q.split(BLOCK, dim=2):
        end += block.shape[2]
        width = 1 << (end - 1).bit_length()  # powers of two: few masks, whatever the lengths
        mask = lower_right_mask(width, q.dtype, q.device)[-block.shape[2] :, -end:]
        attended.append(
            F.scaled_dot_product_attention(
                block, k[:, :, :end], v[:, :, :end], attn_mask=mask, **options
            )
        )
    return torch.cat(attended, dim=2)


@lru_cache(maxsize=4)
def lower_right_mask(width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return what is added to the scores of the last queries, at most `BLOCK`, of `width` keys."""
    rows = min(BLOCK, width)
    with torch.inference_mode(False):
        mask = torch.full((rows, width), float("-inf"), dtype=dtype, device=device)
        return mask.triu_(width - rows + 1)
