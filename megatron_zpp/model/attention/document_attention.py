"""Causal attention within documents (Megatron's --reset-attention-mask), without an S x S mask.

The rows of a micro-batch [B, S] are concatenated to one sequence of B * S tokens. `edges` int32
[n + 1] are the indices where its n documents begin, 0 first, followed by B * S. On CUDA in 16 bit
one kernel for sequences of different lengths attends to all documents. Elsewhere, and with
attention dropout, windows, ALiBi or caps, each document is computed by itself.
Shapes: B rows, S tokens of a row, N query heads, K key-value heads, D channels of a head.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from megatron_zpp.model.attention.prefix_attention import attend_last
from megatron_zpp.model.attention.scores import CAUSAL, Scores

KERNEL_DTYPES = (torch.bfloat16, torch.float16)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    edges: Tensor | None,
    dropout: float,
    first: int = 0,
    scores: Scores = CAUSAL,
) -> Tensor:
    """Map q [B, R, N, D] of the R tokens of each row from `first` on to [B, R, N, D].

    k and v [B, S, K, D] are those of whole rows, which are one document each without `edges`.
    Values may have another width V than queries and keys, as then has the result; the scores have a
    scale then.
    """
    width = v.shape[-1]
    if width != q.shape[-1]:  # PyTorch's fused kernels want the same
        widest = max(width, q.shape[-1])
        q, k, v = (F.pad(each, (0, widest - each.shape[-1])) for each in (q, k, v))
        return attend(q, k, v, edges, dropout, first, scores)[..., :width]
    if edges is not None:
        return attend_documents(q, k, v, edges, dropout, first, scores)
    end = first + q.shape[1]
    if end < k.shape[1]:
        k, v = k[:, :end], v[:, :end]
    q, k, v = (part.transpose(1, 2) for part in (q, k, v))
    return attend_last(q, k, v, dropout, scores).transpose(1, 2)


def attend_documents(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    edges: Tensor,
    dropout: float,
    first: int = 0,
    scores: Scores = CAUSAL,
) -> Tensor:
    """Map q [B, R, N, D] of the R tokens of each row from `first` on to [B, R, N, D].

    k and v [B, S, K, D] are those of whole rows, and edges int32 [n + 1] their documents.
    """
    num_queries, end = q.shape[1], first + q.shape[1]
    row, place = edges // k.shape[1], edges % k.shape[1]
    q_edges = row * num_queries + (place - first).clamp(0, num_queries)
    k_edges = row * end + place.clamp(max=end)
    flat_q, flat_k, flat_v = (part.flatten(0, 1) for part in (q, k[:, :end], v[:, :end]))
    has_kernel = q.is_cuda and q.dtype in KERNEL_DTYPES and not dropout
    if has_kernel and scores.is_causal_only(end):
        group_size = q.shape[2] // k.shape[2]
        # The kernel of torch 2.11 needs a key and a value for each query head.
        flat_k, flat_v = (part.repeat_interleave(group_size, dim=1) for part in (flat_k, flat_v))
        attended = varlen_attn(
            flat_q,
            flat_k,
            flat_v,
            q_edges,
            k_edges,
            num_queries,
            end,
            window_size=(-1, 0),
            scale=scores.scale,
        )
    else:
        attended = _attend_each((flat_q, flat_k, flat_v), q_edges, k_edges, dropout, scores)
    return attended.view(q.shape)


@torch.compiler.disable
def _attend_each(
    flat_qkv: tuple[Tensor, Tensor, Tensor],
    q_edges: Tensor,
    k_edges: Tensor,
    dropout: float,
    scores: Scores,
) -> Tensor:
    """Return the attention of each document by itself, [B * R, N, D].

    The queries of a document are its last tokens; some documents have none.
    """
    q_lengths, k_lengths = q_edges.diff().tolist(), k_edges.diff().tolist()
    attended = []
    lengths = q_lengths, k_lengths, k_lengths
    parts = (part.split(each) for part, each in zip(flat_qkv, lengths, strict=True))
    for document in zip(*parts, strict=True):
        q, k, v = (part.transpose(0, 1)[None] for part in document)  # [1, heads, length, D]
        if q.shape[2] > 0:
            attended.append(attend_last(q, k, v, dropout, scores)[0].transpose(0, 1))
    return torch.cat(attended)
