"""Causal attention within documents (Megatron's --reset-attention-mask), without an S x S mask.

The rows of a micro-batch [B, S] are concatenated to one sequence of B * S tokens. `edges` int32
[n + 1] are the indices where its n documents begin, 0 first, followed by B * S. On CUDA in 16 bit
one kernel for sequences of different lengths attends to all documents. Elsewhere, and with
attention dropout, which that kernel does not support, each document is computed by itself.
Shapes: B rows, S tokens of a row, N query heads, K key-value heads, D channels of a head.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.varlen import varlen_attn

KERNEL_DTYPES = (torch.bfloat16, torch.float16)


def attend_documents(q: Tensor, k: Tensor, v: Tensor, edges: Tensor, dropout: float) -> Tensor:
    """Map q [B, S, N, D], k and v [B, S, K, D] to [B, S, N, D], with edges int32 [n + 1]."""
    max_length = q.shape[1]  # no document is longer than a row
    flat_q, flat_k, flat_v = (part.flatten(0, 1) for part in (q, k, v))  # [B * S, heads, D]
    if q.is_cuda and q.dtype in KERNEL_DTYPES and not dropout:
        group_size = q.shape[2] // k.shape[2]
        # The kernel of torch 2.11 needs a key and a value for each query head.
        flat_k, flat_v = (part.repeat_interleave(group_size, dim=1) for part in (flat_k, flat_v))
        attended = varlen_attn(
            flat_q, flat_k, flat_v, edges, edges, max_length, max_length, window_size=(-1, 0)
        )
    else:
        attended = _attend_each((flat_q, flat_k, flat_v), edges, dropout)
    return attended.view(q.shape)


def attend_in_prefix(
    q: Tensor, k: Tensor, v: Tensor, first: int, edges: Tensor | None, dropout: float
) -> Tensor:
    """Map q [B, R, N, D] of the R tokens from `first` on to [B, R, N, D].

    k and v [B, S, K, D] are those of whole rows; tokens attend to those before them, if there are
    `edges` int32 [n + 1] only to those of their document.
    """
    end = first + q.shape[1]
    mask = causal_lower_right(q.shape[1], end)
    if edges is not None:
        mask = _same_document(edges, len(q), k.shape[1], first, end)
    attended = F.scaled_dot_product_attention(
        q.transpose(1, 2), k[:, :end].transpose(1, 2), v[:, :end].transpose(1, 2), attn_mask=mask,
        dropout_p=dropout, enable_gqa=q.shape[2] > k.shape[2],
    )  # fmt: skip
    return attended.transpose(1, 2)


def _same_document(edges: Tensor, rows: int, length: int, first: int, end: int) -> Tensor:
    """Return which of `end` tokens each from `first` on may see, bool [B, 1, R, end]."""
    indices = torch.arange(rows * length, device=edges.device, dtype=edges.dtype)
    document = torch.bucketize(indices, edges, right=True).view(rows, length)
    position = torch.arange(end, device=edges.device)
    is_before = position <= position[first:, None]
    return (is_before & (document[:, None, :end] == document[:, first:end, None]))[:, None]


@torch.compiler.disable
def _attend_each(flat_qkv: tuple[Tensor, Tensor, Tensor], edges: Tensor, dropout: float) -> Tensor:
    """Return the attention of each document by itself, [B * S, N, D]."""
    lengths = edges.diff().tolist()
    is_grouped = flat_qkv[0].shape[1] != flat_qkv[1].shape[1]
    attended = []
    for document in zip(*(part.split(lengths) for part in flat_qkv), strict=True):
        q, k, v = (part.transpose(0, 1)[None] for part in document)  # [1, heads, length, D]
        output = F.scaled_dot_product_attention(
            q, k, v, dropout_p=dropout, is_causal=True, enable_gqa=is_grouped
        )
        attended.append(output[0].transpose(0, 1))
    return torch.cat(attended)
