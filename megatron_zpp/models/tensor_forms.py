"""How one of our tensors is made of Hugging Face's, and these of it again.

A form only moves numbers, so both directions are exact; on the meta device it tells shapes. Legend:
N query heads, K key-value heads, Q = N/K of one group, D channels of a head.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_zpp.settings.config import ModelConfig


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What forms need to know: the model, the rows of their vocabulary, and of ours, padded."""

    model: ModelConfig
    vocab_rows: int
    padded_rows: int


@dataclass(frozen=True, kw_only=True)
class Form:
    """`join` makes our tensor of theirs, `split` theirs of ours, which may lie inputs first."""

    join: Callable[[Sequence[Tensor], Sizes], Tensor]
    split: Callable[[Tensor, Sizes], tuple[Tensor, ...]]
    is_inputs_first: bool = False

    def split_rows(self, ours: Tensor, sizes: Sizes) -> tuple[Tensor, ...]:
        """`split` of a matrix whose rows alone are those of our weight [out, ...], as LoRA's B."""
        parts = self.split(ours, sizes)
        return tuple(part.T for part in parts) if self.is_inputs_first else parts


def _pad(parts: Sequence[Tensor], sizes: Sizes) -> Tensor:
    """Add rows of zeros: [vocabulary, H] → [padded vocabulary, H]."""
    (rows,) = parts
    if sizes.padded_rows == sizes.vocab_rows:
        return rows
    padded = rows.new_zeros(sizes.padded_rows, *rows.shape[1:])
    padded[: sizes.vocab_rows] = rows
    return padded


def _group(parts: Sequence[Tensor], sizes: Sizes) -> Tensor:
    """Queries [N * D, ...], keys and values [K * D, ...] → [K * (Q + 2) * D, ...], by groups."""
    kv_heads, tail = sizes.model.kv_heads, parts[0].shape[1:]
    groups = [part.reshape(kv_heads, -1, *tail) for part in parts]
    return torch.cat(groups, dim=1).flatten(0, 1)


def _ungroup(ours: Tensor, sizes: Sizes) -> tuple[Tensor, ...]:
    kv_heads, width = sizes.model.kv_heads, sizes.model.head_dim
    groups = ours.unflatten(0, (kv_heads, -1))  # [K, (Q + 2) * D, ...]
    queries = sizes.model.num_attention_heads // kv_heads * width
    return tuple(part.flatten(0, 1) for part in groups.split((queries, width, width), dim=1))


def _group_columns(parts: Sequence[Tensor], sizes: Sizes) -> Tensor:
    """GPT-2's [H, 3 * N * D] or [3 * N * D]: all queries, all keys, all values; inputs first."""
    (fused,) = parts
    return _group(fused.T.chunk(3) if fused.ndim == 2 else fused.chunk(3), sizes)


def _ungroup_columns(ours: Tensor, sizes: Sizes) -> tuple[Tensor, ...]:
    fused = torch.cat(_ungroup(ours, sizes))
    return (fused.T if fused.ndim == 2 else fused,)


SAME = Form(join=lambda parts, sizes: parts[0], split=lambda ours, sizes: (ours,))
TRANSPOSED = Form(
    join=lambda parts, sizes: parts[0].T,
    split=lambda ours, sizes: (ours.T,),
    is_inputs_first=True,
)
VOCABULARY = Form(join=_pad, split=lambda ours, sizes: (ours[: sizes.vocab_rows],))
GROUPED = Form(join=_group, split=_ungroup)
GROUPED_COLUMNS = Form(join=_group_columns, split=_ungroup_columns, is_inputs_first=True)
