"""Causal attention that stops at the ends of documents, without a mask of S x S.

The tokens of a micro-batch [B, S] lie end to end, row after row; `edges` int32 [n + 1] says where
documents begin in that line, with 0 first and B * S last (Megatron's --reset-attention-mask).
On CUDA in 16 bit all documents go through one kernel for sequences of different lengths. Elsewhere,
and with attention dropout, which that kernel does not have, each document is attended to by itself.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

NARROW = (torch.bfloat16, torch.float16)


def attend_documents(q: Tensor, k: Tensor, v: Tensor, edges: Tensor, dropout: float) -> Tensor:
    """Core attention: q [B, S, N, D], k and v [B, S, K, D], edges int32 [n + 1] → [B, S, N, D]."""
    longest = q.shape[1]  # no document is longer than a row
    line = [part.flatten(0, 1) for part in (q, k, v)]  # [B * S, heads, D]
    if q.is_cuda and q.dtype in NARROW and not dropout:
        queries = q.shape[2] // k.shape[2]  # of one group: torch 2.11 wants a key for each
        line[1:] = [part.repeat_interleave(queries, dim=1) for part in line[1:]]
        attended = varlen_attn(*line, edges, edges, longest, longest, window_size=(-1, 0))
    else:
        attended = _one_by_one(line, edges, dropout)
    return attended.view(q.shape)


@torch.compiler.disable
def _one_by_one(line: list[Tensor], edges: Tensor, dropout: float) -> Tensor:
    """Attention of each document by itself, [B * S, N, D]; a backward pass is one concatenation."""
    lengths = edges.diff().tolist()
    grouped = line[0].shape[1] != line[1].shape[1]
    attended = [
        F.scaled_dot_product_attention(
            *(part.transpose(0, 1)[None] for part in document),  # [1, heads, length, D]
            dropout_p=dropout,
            is_causal=True,
            enable_gqa=grouped,
        )[0].transpose(0, 1)
        for document in zip(*(part.split(lengths) for part in line), strict=True)
    ]
    return torch.cat(attended)
