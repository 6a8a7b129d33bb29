"""Causal self-attention with grouped queries.

With a tensor axis N and K are those of a rank, with a context axis S too where sequences are
split; x has a rank's rows where rows are split.
Shapes: B batch, S sequence, H hidden, N query heads, K key-value heads, Q = N/K query heads of one
group, D channels of a head, V of its values where they have a width of their own.
"""

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from megatron_zpp.model.attention.document_attention import attend
from megatron_zpp.model.attention.rotary import GLOBAL, LOCAL, NONE, Rotary, rotate
from megatron_zpp.model.attention.scores import Scores
from megatron_zpp.model.attention.sequences import WHOLE_ROWS, Sequences
from megatron_zpp.model.normalization import (
    NormPerHead,
    apply_norm,
    make_norm,
    norm_of_all_heads,
)
from megatron_zpp.model.part import WHOLE, Part, recomputed
from megatron_zpp.model.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    own_random_numbers,
)
from megatron_zpp.parallel.axes import (
    enter,
    exchange_heads,
    exchange_rows,
    gather_keys,
    part_of,
    parts_of_sequence,
)
from megatron_zpp.parallel.collectives import gather_columns, moved, sum_columns
from megatron_zpp.settings.config import ModelConfig
from zeropp.optim import local_part

# What normalizes queries and keys in `Attention`: each head by itself, or all heads at once.
QK_NORMS = frozenset({"q_norm", "k_norm", "queries_norm", "keys_norm"})


class CoreAttention(nn.Module):
    """Causal attention of queries to keys and values; subclasses compute these."""

    def __init__(self, config: ModelConfig, layer: int = 0, part: Part = WHOLE) -> None:
        super().__init__()
        self.axis, self.context, self.gathers_keys = part.tensor, part.context, part.gathers_keys
        has_window = config.windows[layer] is not None
        is_local = has_window and config.rotary_base_local is not None
        kind = NONE if config.layers_without_rope[layer] else LOCAL if is_local else GLOBAL
        self.layer, self.rotary_kind = layer, kind
        self.dropout = config.attention_dropout
        self.softmax_type, self.sinks = config.softmax_type, None
        self.split_dims: dict[str, int] = {}
        if config.softmax_type == "learnable":
            self.sinks = nn.Parameter(torch.empty(config.num_attention_heads))
            if (axis := part.tensor) is not None:
                self.sinks = part_of(self.sinks, 0, axis.size, axis.mesh)
                self.split_dims["sinks"] = 0
        self.scores = Scores.of(config, layer, part.tensor)
        self.is_recomputed = part.execution.recomputes_attention

    def scores_of(self, q: Tensor, *, own_heads: int | None = None) -> Scores:
        """Return the scores of queries q [..., N, D], with the sinks that they have in this pass.

        own_heads: the place of a context rank, of whose heads q has only a part.
        """
        if self.softmax_type == "vanilla":
            return self.scores
        heads = q.shape[-2]
        sinks = q.new_zeros(heads) if self.sinks is None else local_part(self.sinks)
        if own_heads is not None and self.sinks is not None:
            sinks = sinks.narrow(0, own_heads * heads, heads)
        return replace(self.scores, sinks=sinks)

    def attended(self, q: Tensor, k: Tensor, v: Tensor, sequences: Sequences) -> Tensor:
        """Return `core` of the arguments, whose activations backward may compute again."""
        if self.is_recomputed:
            return recomputed(self.core, q, k, v, sequences)
        return self.core(q, k, v, sequences)

    def core(self, q: Tensor, k: Tensor, v: Tensor, sequences: Sequences = WHOLE_ROWS) -> Tensor:
        """Map q [B, S, N, D], k [B, S, K, D] and v [B, S, K, V] to [B, S, N, V].

        The softmax is in fp32.
        """
        context = self.context if sequences.is_split else None
        dropout, edges = self.dropout if self.training else 0.0, sequences.edges
        if context is not None and self.gathers_keys:
            k, v = gather_keys(k, v, context)
            numbers, scores = parts_of_sequence(context, gathers_keys=True), self.scores_of(q)
            parts = zip(numbers, q.chunk(len(numbers), dim=1), strict=True)
            attended = [
                attend(part, k, v, edges, dropout, number * part.shape[1], scores)
                for number, part in parts
            ]
            return torch.cat(attended, dim=1)
        if context is not None:
            q, k, v = exchange_rows(q, k, v, context)
        scores = self.scores_of(q, own_heads=None if context is None else context.index)
        with own_random_numbers(self.axis, sequences.splits_rows, dropout, q.device):
            attended = attend(q, k, v, edges, dropout, scores=scores)
        return attended if context is None else exchange_heads(attended, context)


class Attention(CoreAttention):
    """Causal self-attention with grouped queries and one matrix for queries, keys and values.

    The rows of that matrix are ordered by groups, [K, Q + 2, D]: the query heads of a group, then
    its key and its value. Any slice of whole groups is therefore an attention layer itself.
    """

    def __init__(self, config: ModelConfig, layer: int = 0, part: Part = WHOLE) -> None:
        super().__init__(config, layer, part)
        axis, self.head_dim = part.tensor, config.head_dim
        num_ranks = 1 if axis is None else axis.size
        self.kv_heads = max(config.kv_heads // num_ranks, 1)
        self.group_size = config.num_attention_heads // max(config.kv_heads, num_ranks)
        self.ranks_per_group = max(num_ranks // config.kv_heads, 1)
        self.is_interleaved = config.rotary_interleaved
        self.turns_first = config.qk_layernorm_after_rope
        hidden, width = config.hidden_size, config.num_attention_heads * self.head_dim
        kv_width = config.kv_heads * self.head_dim
        self.qkv = ColumnParallelLinear(hidden, width + 2 * kv_width, config.has_qkv_bias, axis)
        self.q_norm = self.k_norm = self.queries_norm = self.keys_norm = None
        self.grad_is_partial = ()
        if config.qk_layernorm and config.qk_layernorm_across_heads:
            self.queries_norm = norm_of_all_heads(config, width, part)
            self.keys_norm = norm_of_all_heads(config, kv_width, part)
        elif config.qk_layernorm and config.qk_layernorm_per_head:
            self.q_norm = NormPerHead(config, config.num_attention_heads, axis)
            self.k_norm = NormPerHead(config, config.kv_heads, axis)
        elif config.qk_layernorm:
            self.q_norm = make_norm(config, self.head_dim, part.norms)
            self.k_norm = make_norm(config, self.head_dim, part.norms)
            self.grad_is_partial = ("q_norm", "k_norm")  # of a rank's heads
        bias = config.has_attention_output_bias
        self.output = RowParallelLinear(width, hidden, bias, axis, part.splits_rows)

    def forward(self, x: Tensor, sequences: Sequences = WHOLE_ROWS) -> Tensor:
        """Map x [B, S, H] to [B, S, H]."""
        splits_rows, cache = sequences.splits_rows, sequences.cache
        if self.axis is not None:
            x = enter(x, self.axis, splits_rows)
        queries = self.group_size
        shape = (*x.shape[:2], self.kv_heads, queries + 2, self.head_dim)
        qkv = self.qkv(x) if self.ranks_per_group == 1 else self._own_heads(self.qkv(x))
        qkv = qkv.view(shape)  # [B, S, K, Q + 2, D]
        qk, v = qkv.split((queries + 1, 1), dim=3)
        rotary = sequences.rotary[self.rotary_kind] if sequences.rotary else None
        turned = self._turned(qk, rotary)
        q, k, v = (part.flatten(2, 3) for part in (*turned, v))
        if sequences.query_scale is not None:
            q = q * sequences.query_scale.to(q.dtype)
        if cache is not None:
            attended = cache.layers[self.layer].attend(q, k, v, self.scores_of(q))
        else:
            attended = self.attended(q, k, v, sequences)
        return self.output(attended.flatten(2), splits_rows)

    def _own_heads(self, qkv: Tensor) -> Tensor:
        """Return this rank's queries with the key and the value of its group, [B, S, Q + 2, D].

        Several ranks share a group, of whose channels each has a part: qkv [B, S, (N + 2K)D/T].
        """
        group, place = divmod(self.axis.index, self.ranks_per_group)
        num_groups = self.axis.size // self.ranks_per_group
        columns = moved(qkv, self.axis, gather_columns, sum_columns)
        whole = columns.unflatten(-1, (num_groups, -1, self.head_dim))
        queries = whole[:, :, group].narrow(2, place * self.group_size, self.group_size)
        return torch.cat((queries, whole[:, :, group, -2:]), dim=2)

    def _turned(self, qk: Tensor, rotary: Rotary | None) -> tuple[Tensor, Tensor]:
        """Split qk [B, S, K, Q + 1, D] into queries and keys, normalized and rotated."""
        sizes, turn = (self.group_size, 1), partial(rotate, is_interleaved=self.is_interleaved)
        has_norm = self.q_norm is not None or self.queries_norm is not None
        if rotary is not None and (self.turns_first or not has_norm):
            qk = turn(qk, rotary)
        q, k = qk.split(sizes, dim=3)
        if self.q_norm is not None:
            q, k = apply_norm(self.q_norm, q), apply_norm(self.k_norm, k)
        elif has_norm:
            shapes, (q, k) = (q.shape, k.shape), (q.flatten(2), k.flatten(2))
            q = apply_norm(self.queries_norm, q).view(shapes[0])
            k = apply_norm(self.keys_norm, k).view(shapes[1])
        if rotary is None or self.turns_first or not has_norm:
            return q, k
        return turn(q, rotary), turn(k, rotary)
