"""The layers of a GPT: normalization, attention, MLP, and transformer block.

With a tensor axis N, K and F are those of a rank, with a context axis S too where sequences are
split; x has a rank's rows where rows are split.
Shapes: B batch, S sequence, H hidden, F hidden of the MLP, N query heads, K key-value
heads, Q = N/K query heads of one group, D channels of a head.
"""

from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_zpp.model.cache import KeyValueCache
from megatron_zpp.model.document_attention import attend
from megatron_zpp.model.execution import recomputed
from megatron_zpp.model.lora import adapters_of
from megatron_zpp.model.part import TORCH_NORMS, WHOLE, NormClasses, Part
from megatron_zpp.model.rotary import Rotary, rotary_kinds, rotate
from megatron_zpp.model.scores import Scores
from megatron_zpp.model.tensor_parallel import (
    ColumnParallelLinear,
    ParallelRMSNorm,
    RowParallelLinear,
    own_random_numbers,
)
from megatron_zpp.settings.config import ModelConfig

# What normalizes queries and keys in `Attention`: each head by itself, or all heads at once.
QK_NORMS = frozenset({"q_norm", "k_norm", "queries_norm", "keys_norm"})


@dataclass(frozen=True, kw_only=True)
class Sequences:
    """The sequences that x belongs to in a pass: what layers know of its tokens.

    rotary: the tables of their positions, by `rotary_kinds`; empty if there are none. edges int32
    [n + 1]: where documents begin, to which attention is then limited. cache: earlier tokens, which
    x continues. is_split: each context rank has a part of the tokens. splits_rows: each tensor rank
    has some rows of x between the layers that are split (sequence parallelism).
    """

    rotary: tuple[Rotary | None, ...] = ()
    edges: Tensor | None = None
    cache: KeyValueCache | None = None
    is_split: bool = False
    splits_rows: bool = False


WHOLE_ROWS = Sequences()


def make_norm(
    config: ModelConfig, size: int | None = None, norms: NormClasses = TORCH_NORMS
) -> nn.Module:
    """Return a normalization over `size` channels, by default H; it computes in fp32."""
    classes = {
        ("LayerNorm", False): norms.layer_norm,
        ("RMSNorm", False): norms.rms_norm,
        ("LayerNorm", True): LayerNorm1P,
        ("RMSNorm", True): RMSNorm1P,
    }
    norm_class = classes[config.normalization, config.apply_layernorm_1p]
    return norm_class(size or config.hidden_size, eps=config.layernorm_epsilon)


def norm_of_all_heads(config: ModelConfig, size: int, part: Part) -> nn.Module:
    """Return a normalization over the `size` channels of all heads, which ranks may split."""
    if part.tensor is None:
        return make_norm(config, size, part.norms)
    return ParallelRMSNorm(size, config.layernorm_epsilon, part.tensor)


def apply_norm(norm: nn.Module, x: Tensor) -> Tensor:
    """Return `norm(x)` [..., H] in the dtype of the gains, to which an fp32 residual is cast."""
    return norm(x.to(norm.weight.dtype))


class LayerNorm1P(nn.LayerNorm):
    """A LayerNorm whose weight is its gain minus 1."""

    def forward(self, x: Tensor) -> Tensor:
        gain, bias = 1 + self.weight.float(), self.bias.float()
        return F.layer_norm(x.float(), self.normalized_shape, gain, bias, self.eps).to(x.dtype)


class RMSNorm1P(nn.RMSNorm):
    """An RMSNorm whose weight is its gain minus 1."""

    def forward(self, x: Tensor) -> Tensor:
        gain = 1 + self.weight.float()
        return F.rms_norm(x.float(), self.normalized_shape, gain, self.eps).to(x.dtype)


def activate(x: Tensor, config: ModelConfig) -> Tensor:
    """Apply the MLP's nonlinearity: OpenAI's GELU is the tanh form, exact GELU the erf form."""
    if config.swiglu:
        return F.silu(x)  # of the gate
    if config.liglu:
        return x
    if config.relu or config.reglu:
        return F.relu(x)
    if config.squared_relu:
        return squared_relu(x)
    is_approximate = config.openai_gelu or config.bias_gelu_fusion
    return F.gelu(x, approximate="tanh" if is_approximate else "none")


def squared_relu(x: Tensor) -> Tensor:
    """Return max(x, 0)² (So et al. 2021, Primer)."""
    return F.relu(x).square()


class Attention(nn.Module):
    """Causal self-attention with grouped queries and one matrix for queries, keys and values.

    The rows of that matrix are ordered by groups, [K, Q + 2, D]: the query heads of a group, then
    its key and its value. Any slice of whole groups is therefore an attention layer itself.
    """

    def __init__(self, config: ModelConfig, layer: int = 0, part: Part = WHOLE) -> None:
        super().__init__()
        axis, adapters = part.tensor, partial(adapters_of, part.lora, layer)
        self.axis, self.context = axis, part.context
        self.layer, self.rotary_kind = layer, rotary_kinds(config)[layer]
        self.scores = Scores.of(config, layer, axis)
        self.head_dim = config.head_dim
        num_ranks = 1 if axis is None else axis.size
        self.kv_heads = max(config.kv_heads // num_ranks, 1)
        self.group_size = config.num_attention_heads // max(config.kv_heads, num_ranks)
        self.ranks_per_group = max(num_ranks // config.kv_heads, 1)
        self.dropout = config.attention_dropout
        self.is_interleaved = config.rotary_interleaved
        hidden, width = config.hidden_size, config.num_attention_heads * self.head_dim
        kv_width = config.kv_heads * self.head_dim
        self.qkv = ColumnParallelLinear(
            hidden, width + 2 * kv_width, config.has_qkv_bias, axis, adapters("attention.qkv")
        )
        self.q_norm = self.k_norm = self.queries_norm = self.keys_norm = None
        if config.qk_layernorm and config.qk_layernorm_across_heads:
            self.queries_norm = norm_of_all_heads(config, width, part)
            self.keys_norm = norm_of_all_heads(config, kv_width, part)
        elif config.qk_layernorm:
            self.q_norm = make_norm(config, self.head_dim, part.norms)
            self.k_norm = make_norm(config, self.head_dim, part.norms)
        bias = config.has_attention_output_bias
        self.output = RowParallelLinear(width, hidden, bias, axis, adapters("attention.output"))
        self.is_recomputed = part.execution.recomputes_attention

    def forward(self, x: Tensor, sequences: Sequences = WHOLE_ROWS) -> Tensor:
        """Map x [B, S, H] to [B, S, H]."""
        splits_rows, cache = sequences.splits_rows, sequences.cache
        if self.axis is not None:
            x = self.axis.enter(x, splits_rows)
        queries = self.group_size
        shape = (*x.shape[:2], self.kv_heads, queries + 2, self.head_dim)
        qkv = self.qkv(x) if self.ranks_per_group == 1 else self._own_heads(self.qkv(x))
        qkv = qkv.view(shape)  # [B, S, K, Q + 2, D]
        qk, v = qkv.split((queries + 1, 1), dim=3)
        rotary = sequences.rotary[self.rotary_kind] if sequences.rotary else None
        q, k, v = (part.flatten(2, 3) for part in (*self._turned(qk, rotary), v))
        if cache is not None:
            attended = cache.layers[self.layer].attend(q, k, v, self.scores)
        elif self.is_recomputed:
            attended = recomputed(self.core, q, k, v, sequences)
        else:
            attended = self.core(q, k, v, sequences)
        return self.output(attended.flatten(2), splits_rows)

    def _own_heads(self, qkv: Tensor) -> Tensor:
        """Return this rank's queries with the key and the value of its group, [B, S, Q + 2, D].

        Several ranks share a group, of whose channels each has a part: qkv [B, S, (N + 2K)D/T].
        """
        group, place = divmod(self.axis.place, self.ranks_per_group)
        num_groups = self.axis.size // self.ranks_per_group
        whole = self.axis.all_columns(qkv).unflatten(-1, (num_groups, -1, self.head_dim))
        queries = whole[:, :, group].narrow(2, place * self.group_size, self.group_size)
        return torch.cat((queries, whole[:, :, group, -2:]), dim=2)

    def _turned(self, qk: Tensor, rotary: Rotary | None) -> tuple[Tensor, Tensor]:
        """Split qk [B, S, K, Q + 1, D] into queries and keys, normalized and then rotated."""
        sizes, turn = (self.group_size, 1), partial(rotate, is_interleaved=self.is_interleaved)
        if self.q_norm is None and self.queries_norm is None:
            return (qk if rotary is None else turn(qk, rotary)).split(sizes, dim=3)
        q, k = qk.split(sizes, dim=3)
        if self.q_norm is not None:
            q, k = apply_norm(self.q_norm, q), apply_norm(self.k_norm, k)
        else:
            shapes, (q, k) = (q.shape, k.shape), (q.flatten(2), k.flatten(2))
            q = apply_norm(self.queries_norm, q).view(shapes[0])
            k = apply_norm(self.keys_norm, k).view(shapes[1])
        return (q, k) if rotary is None else (turn(q, rotary), turn(k, rotary))

    def core(self, q: Tensor, k: Tensor, v: Tensor, sequences: Sequences = WHOLE_ROWS) -> Tensor:
        """Map q [B, S, N, D], k and v [B, S, K, D] to [B, S, N, D]; the softmax is in fp32."""
        context = self.context if sequences.is_split else None
        dropout, edges = self.dropout if self.training else 0.0, sequences.edges
        if context is not None and context.gathers_keys:
            k, v = context.gather_keys(k, v)
            parts = zip(context.parts, q.chunk(len(context.parts), dim=1), strict=True)
            attended = [
                attend(part, k, v, edges, dropout, number * part.shape[1], self.scores)
                for number, part in parts
            ]
            return torch.cat(attended, dim=1)
        if context is not None:
            q, k, v = context.exchange_rows(q, k, v)
        with own_random_numbers(self.axis, sequences.splits_rows, dropout, q.device):
            attended = attend(q, k, v, edges, dropout, scores=self.scores)
        return attended if context is None else context.exchange_heads(attended)


class MLP(nn.Module):
    """Two linear layers with a nonlinearity between them, and perhaps a third one as a gate."""

    def __init__(self, config: ModelConfig, layer: int = 0, part: Part = WHOLE) -> None:
        super().__init__()
        bias, adapters = config.has_mlp_bias, partial(adapters_of, part.lora, layer)
        hidden, ffn, axis = config.hidden_size, config.ffn_size, part.tensor
        self.config, self.axis = config, axis
        self.input = ColumnParallelLinear(hidden, ffn, bias, axis, adapters("mlp.input"))
        self.gate = None
        if config.is_gated:
            self.gate = ColumnParallelLinear(hidden, ffn, bias, axis, adapters("mlp.gate"))
        self.output = RowParallelLinear(ffn, hidden, bias, axis, adapters("mlp.output"))

    def forward(self, x: Tensor, splits_rows: bool = False) -> Tensor:
        """Map x [B, S, H] to [B, S, H], through [B, S, F]."""
        if self.axis is not None:
            x = self.axis.enter(x, splits_rows)
        if self.gate is None:
            return self.output(activate(self.input(x), self.config), splits_rows)
        return self.output(activate(self.gate(x), self.config) * self.input(x), splits_rows)


class Block(nn.Module):
    """Transformer block: a branch of attention, then one of the MLP, each added to the stream x.

    By default each is normalized before (pre-LN): x + attention(norm1(x)), then x + mlp(norm2(x));
    by `norm_placement` behind, before it is added, or on both sides. Parallel, both start from the
    same x. The execution of the model's part runs `compute` inside the block's hooks. With an fp32
    residual stream x must be fp32 whatever the dtype of the weights.
    """

    def __init__(
        self,
        config: ModelConfig,
        layer: int = 0,
        part: Part = WHOLE,
        *,
        is_recomputed: bool = False,
    ) -> None:
        super().__init__()
        has_norm = config.norm_placement != "post"
        has_post_norm = config.norm_placement != "pre"
        self.norm1 = make_norm(config, norms=part.norms) if has_norm else None
        self.attention = Attention(config, layer, part)
        self.post_norm1 = make_norm(config, norms=part.norms) if has_post_norm else None
        self.norm2 = make_norm(config, norms=part.norms) if has_norm else None
        self.mlp = MLP(config, layer, part)
        self.post_norm2 = make_norm(config, norms=part.norms) if has_post_norm else None
        self.dropout = config.hidden_dropout
        self.is_parallel = config.use_parallel_residual
        self.residual_after_norm = config.apply_residual_connection_post_layernorm
        self.fp32_residual = config.fp32_residual_connection
        self.execution, self.is_recomputed = part.execution, is_recomputed

    def forward(self, x: Tensor, sequences: Sequences = WHOLE_ROWS) -> Tensor:
        """Map x [B, S, H] to [B, S, H]; with a cache neither compiled nor recomputed."""
        if sequences.cache is not None:
            return self.compute(x, sequences)
        return self.execution.run_block(
            Block.compute, self, x, sequences, recompute=self.is_recomputed
        )

    def compute(self, x: Tensor, sequences: Sequences) -> Tensor:
        """Map x [B, S, H] to [B, S, H], as it is."""
        if self.fp32_residual:
            assert x.dtype == torch.float32, "the fp32 residual was cast to 16 bit"
        normalized = self._enter(self.norm1, x)
        attended = self._leave(self.post_norm1, self.attention(normalized, sequences))
        if self.is_parallel:
            branch = self.mlp(self._enter(self.norm2, x), sequences.splits_rows)
            branch = self._leave(self.post_norm2, branch)
            return self._residual(x, normalized) + (branch + attended)
        x = self._residual(x, normalized) + attended
        normalized = self._enter(self.norm2, x)
        branch = self._leave(self.post_norm2, self.mlp(normalized, sequences.splits_rows))
        return self._residual(x, normalized) + branch

    def _enter(self, norm: nn.Module | None, x: Tensor) -> Tensor:
        """Return what a branch is computed of, in the dtype of its weights."""
        return x.to(self.mlp.output.weight.dtype) if norm is None else apply_norm(norm, x)

    def _leave(self, norm: nn.Module | None, branch: Tensor) -> Tensor:
        """Return what a branch adds to the stream."""
        branch = branch if norm is None else apply_norm(norm, branch)
        return F.dropout(branch, self.dropout, self.training)

    def _residual(self, x: Tensor, normalized: Tensor) -> Tensor:
        residual = normalized if self.residual_after_norm else x
        return residual.float() if self.fp32_residual else residual
