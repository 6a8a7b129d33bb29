"""How a weight of our GPT is laid out in Hugging Face's tensors, converted in both directions.

A form only moves numbers, so both directions are exact. On the meta device it computes shapes.
Legend: N query heads, K key-value heads, Q = N/K query heads of one group, D channels of a head, H
hidden size.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_zpp.settings.config import ModelConfig


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What forms need to know: the model, and the rows of its vocabulary in files and in the GPT.

    `vocab_rows` counts the rows in Hugging Face's tensors, `padded_rows` those of the GPT.
    `further_layers`: as many layers behind those of the model may be in files, and are left out.
    """

    model: ModelConfig
    vocab_rows: int
    padded_rows: int
    further_layers: int = 0


@dataclass(frozen=True, kw_only=True)
class Form:
    """A pair of conversions: `join` of Hugging Face's tensors into one of ours, `split` back.

    `is_transposed`: Hugging Face stores the matrix as [in, out], ours is [out, in]; biases are the
    same in both. `place` is set where several rows of the table have parts of one tensor, which are
    in it one after another, in dimension `dim`, or in turn, each a slice of the last one.
    """

    join: Callable[[Sequence[Tensor], Sizes], Tensor]
    split: Callable[[Tensor, Sizes], tuple[Tensor, ...]]
    is_transposed: bool = False
    place: int | None = None
    dim: int = 0
    is_in_turn: bool = False

    def split_rows(self, matrix: Tensor, sizes: Sizes) -> tuple[Tensor, ...]:
        """Split a matrix that has the rows of our weight but other columns, such as LoRA's B."""
        parts = self.split(matrix, sizes)
        if self.is_transposed:
            return tuple(part.T for part in parts)
        return parts


def _pad_vocabulary(parts: Sequence[Tensor], sizes: Sizes) -> Tensor:
    """Add rows of zeros: [vocab_rows, H] → [padded_rows, H]."""
    (embedding,) = parts
    if sizes.padded_rows == sizes.vocab_rows:
        return embedding
    padded = embedding.new_zeros(sizes.padded_rows, *embedding.shape[1:])
    padded[: sizes.vocab_rows] = embedding
    return padded


def _unpad_vocabulary(padded: Tensor, sizes: Sizes) -> tuple[Tensor, ...]:
    return (padded[: sizes.vocab_rows],)


def _join_qkv(parts: Sequence[Tensor], sizes: Sizes) -> Tensor:
    """Queries [N * D, ...], keys and values [K * D, ...] → [K * (Q + 2) * D, ...], by groups."""
    kv_heads = sizes.model.kv_heads
    columns = parts[0].shape[1:]
    groups = [part.reshape(kv_heads, -1, *columns) for part in parts]
    return torch.cat(groups, dim=1).flatten(0, 1)


def _split_qkv(qkv: Tensor, sizes: Sizes) -> tuple[Tensor, ...]:
    kv_heads, head_dim = sizes.model.kv_heads, sizes.model.head_dim
    groups = qkv.unflatten(0, (kv_heads, -1))  # [K, (Q + 2) * D, ...]
    query_rows = sizes.model.num_attention_heads // kv_heads * head_dim
    parts = groups.split((query_rows, head_dim, head_dim), dim=1)
    return tuple(part.flatten(0, 1) for part in parts)


def _join_transposed_qkv(parts: Sequence[Tensor], sizes: Sizes) -> Tensor:
    """GPT-2's weight [H, 3 * N * D] or bias [3 * N * D]: all queries, all keys, all values."""
    (fused,) = parts
    return _join_qkv(fused.t().chunk(3), sizes)


def _split_transposed_qkv(qkv: Tensor, sizes: Sizes) -> tuple[Tensor, ...]:
    return (torch.cat(_split_qkv(qkv, sizes)).t(),)


def _join_fused_qkv(parts: Sequence[Tensor], sizes: Sizes) -> Tensor:
    """All queries, all keys and all values [(N + 2K) * D, ...]."""
    (fused,) = parts
    kv_rows = sizes.model.kv_heads * sizes.model.head_dim
    return _join_qkv(fused.split((len(fused) - 2 * kv_rows, kv_rows, kv_rows)), sizes)


def _split_fused_qkv(qkv: Tensor, sizes: Sizes) -> tuple[Tensor, ...]:
    return (torch.cat(_split_qkv(qkv, sizes)),)


def _swap_halves(rows: Tensor, sizes: Sizes) -> Tensor:
    """Swap the halves of each head's channels: [heads * D, ...] → [heads * D, ...]."""
    halves = rows.unflatten(0, (-1, 2, sizes.model.head_dim // 2))
    return halves.flip(1).flatten(0, 2)


def _join_swapped_qkv(parts: Sequence[Tensor], sizes: Sizes) -> Tensor:
    q, k, v = parts
    return _join_qkv((_swap_halves(q, sizes), _swap_halves(k, sizes), v), sizes)


def _split_swapped_qkv(qkv: Tensor, sizes: Sizes) -> tuple[Tensor, ...]:
    q, k, v = _split_qkv(qkv, sizes)
    return _swap_halves(q, sizes), _swap_halves(k, sizes), v


def _reordered(part: Tensor, head_dim: int, pairs_first: bool) -> Tensor:
    """Turn rows of heads [D/2, 2] into [2, D/2] if `pairs_first`, otherwise back."""
    inner = (head_dim // 2, 2) if pairs_first else (2, head_dim // 2)
    return part.unflatten(0, (-1, *inner)).transpose(1, 2).flatten(0, 2)


def _join_reordered_qkv(parts: Sequence[Tensor], sizes: Sizes) -> Tensor:
    queries, keys, values = parts
    dim = sizes.model.head_dim
    return _join_qkv((_reordered(queries, dim, True), _reordered(keys, dim, True), values), sizes)


def _split_reordered_qkv(qkv: Tensor, sizes: Sizes) -> tuple[Tensor, ...]:
    queries, keys, values = _split_qkv(qkv, sizes)
    dim = sizes.model.head_dim
    return _reordered(queries, dim, False), _reordered(keys, dim, False), values


def _of_heads(gains: Tensor, sizes: Sizes) -> Tensor:
    """Our gains of all heads, [heads * D] → [heads, D]."""
    return gains.unflatten(0, (-1, sizes.model.head_dim))


def _half(index: int) -> Form:
    """One half of a tensor's rows; another row of the table has the other half."""
    return Form(
        join=lambda parts, sizes: parts[0].chunk(2)[index],
        split=lambda tensor, sizes: (tensor,),
        place=index,
    )


SAME = Form(join=lambda parts, sizes: parts[0], split=lambda tensor, sizes: (tensor,))
TRANSPOSED = Form(
    join=lambda parts, sizes: parts[0].t(),
    split=lambda tensor, sizes: (tensor.t(),),
    is_transposed=True,
)
PADDED_VOCABULARY = Form(join=_pad_vocabulary, split=_unpad_vocabulary)
QKV = Form(join=_join_qkv, split=_split_qkv)
QKV_TRANSPOSED = Form(join=_join_transposed_qkv, split=_split_transposed_qkv, is_transposed=True)
QKV_FUSED = Form(join=_join_fused_qkv, split=_split_fused_qkv)
QKV_HALVES_SWAPPED = Form(join=_join_swapped_qkv, split=_split_swapped_qkv)
QKV_NEIGHBOURS = Form(join=_join_reordered_qkv, split=_split_reordered_qkv)
HEADS = Form(
    join=lambda parts, sizes: parts[0].flatten(),
    split=lambda tensor, sizes: (_of_heads(tensor, sizes),),
)
EACH_HEAD = Form(
    join=lambda parts, sizes: torch.cat(tuple(parts)),
    split=lambda tensor, sizes: _of_heads(tensor, sizes).unbind(0),
)
FIRST_HALF, SECOND_HALF = _half(0), _half(1)
