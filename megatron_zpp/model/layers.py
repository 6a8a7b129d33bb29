"""The parts of a GPT: normalization, rotary positions, attention, MLP, and the block made of them.

Legend of the shapes: B batch, S sequence, H hidden, F inside the MLP, N query heads, K key-value
heads, Q = N/K query heads of one group, D channels of a head, R of them turned by rotary positions.
"""

import math
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_zpp.model.cache import LayerCache
from megatron_zpp.model.document_attention import attend_documents
from megatron_zpp.settings.config import ModelConfig

SLOW_TURNS, FAST_TURNS = 1.0, 4.0  # of Llama 3.1's scaling, over its first training's positions
TRAINED_POSITIONS = 8192
Rotary = tuple[Tensor, Tensor]  # cosines and signed sines, each [B or 1, S, 1, 1, R] in fp32


def direct(function: Callable[..., Tensor], *arguments: object) -> Tensor:
    """Call `function` as it is; activation checkpointing puts another caller in its place."""
    return function(*arguments)


def make_norm(config: ModelConfig) -> nn.Module:
    """The normalization of the residual stream: over H, fp32 inside whatever the dtype."""
    kind = {"LayerNorm": nn.LayerNorm, "RMSNorm": nn.RMSNorm}[config.normalization]
    return kind(config.hidden_size, eps=config.layernorm_epsilon)


def normalized(norm: nn.Module, x: Tensor) -> Tensor:
    """`norm(x)` in the dtype of its gains: an fp32 residual stream [B, S, H] is narrowed here."""
    return norm(x.to(norm.weight.dtype))


def make_activation(config: ModelConfig) -> Callable[[Tensor], Tensor]:
    """The MLP's nonlinearity; OpenAI's GELU is the tanh form, exact GELU is the erf form."""
    if config.swiglu:
        return F.silu
    if config.squared_relu:
        return squared_relu
    tanh = config.openai_gelu or config.bias_gelu_fusion
    return partial(F.gelu, approximate="tanh" if tanh else "none")


def squared_relu(x: Tensor) -> Tensor:
    """max(x, 0)² (So et al. 2021, Primer)."""
    return F.relu(x).square()


def rotary_table(
    positions: Tensor, channels: int, base: float, slowed: float | None = None
) -> Rotary:
    """Cosines and signed sines of rotary positions (Su et al. 2021, halves instead of pairs).

    positions: integers [B or 1, S]; channels: R; `slowed` by so much as `slow_down` does. The sine
    carries the sign of `rotate`.
    """
    exponents = torch.arange(0, channels, 2, device=positions.device, dtype=torch.float32)
    frequencies = 1.0 / base ** (exponents / channels)  # [R/2]
    if slowed is not None:
        frequencies = slow_down(frequencies, slowed)
    angles = positions[:, :, None, None, None].float() * frequencies  # [B, S, 1, 1, R/2]
    cosines, sines = angles.cos(), angles.sin()
    return torch.cat((cosines, cosines), dim=-1), torch.cat((-sines, sines), dim=-1)


def slow_down(frequencies: Tensor, factor: float) -> Tensor:
    """Llama 3.1's scaling of rotary frequencies [R/2], in radians per position.

    What turns SLOW_TURNS times or less over the positions trained first is slowed by `factor`, what
    turns FAST_TURNS times or more stays, and between them it goes over smoothly.
    """
    turns = TRAINED_POSITIONS * frequencies / (2 * math.pi)
    kept = ((turns - SLOW_TURNS) / (FAST_TURNS - SLOW_TURNS)).clamp(0, 1)
    return frequencies * (kept + (1 - kept) / factor)


def rotate(x: Tensor, rotary: Rotary) -> Tensor:
    """Turn channel i with channel i + R/2 of x [B, S, K, heads, D], for i < R/2; in fp32."""
    cosines, sines = rotary
    channels = cosines.shape[-1]
    turned, rest = x.split((channels, x.shape[-1] - channels), dim=-1)
    wide = turned.float()
    # addcmul would not round the product before the sum, and Hugging Face's models do.
    wide = wide * cosines + wide.roll(channels // 2, dims=-1) * sines
    turned = wide.to(x.dtype)
    return turned if rest.shape[-1] == 0 else torch.cat((turned, rest), dim=-1)


class Attention(nn.Module):
    """Causal self-attention, one matrix for queries, keys and values, grouped queries.

    The rows of that matrix lie group by group, [K, Q + 2, D]: a group's query heads, its key, its
    value. So any slice of whole groups is itself an attention layer.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        bias = not config.disable_bias_linear
        self.head_dim = config.head_dim
        self.kv_heads = config.kv_heads
        self.group_size = config.num_attention_heads // config.kv_heads
        self.dropout = config.attention_dropout
        rows = self.kv_heads * (self.group_size + 2) * self.head_dim
        self.qkv = nn.Linear(config.hidden_size, rows, bias=bias)
        width = config.num_attention_heads * self.head_dim
        self.output = nn.Linear(width, config.hidden_size, bias=bias)
        self.call = direct

    def forward(
        self,
        x: Tensor,
        rotary: Rotary | None = None,
        edges: Tensor | None = None,
        cache: LayerCache | None = None,
    ) -> Tensor:
        """x [B, S, H] → [B, S, H]; with `edges` int32 [n + 1] documents do not see each other.

        With a cache x are new tokens, which also see those that are kept there.
        """
        queries = self.group_size
        shape = (*x.shape[:2], self.kv_heads, queries + 2, self.head_dim)
        qkv = self.qkv(x).view(shape)  # [B, S, K, Q + 2, D]
        if rotary is None:
            q, k, v = qkv.split((queries, 1, 1), dim=3)
        else:
            turned, v = qkv.split((queries + 1, 1), dim=3)
            q, k = rotate(turned, rotary).split((queries, 1), dim=3)
        q, k, v = (part.flatten(2, 3) for part in (q, k, v))
        if cache is not None:
            return self.output(cache.attend(q, k, v).flatten(2))
        attended = self.call(self.attend, q, k, v, edges)
        return self.output(attended.flatten(2))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, edges: Tensor | None = None) -> Tensor:
        """Core attention: q [B, S, N, D], k and v [B, S, K, D] → [B, S, N, D]; fp32 softmax."""
        dropout = self.dropout if self.training else 0.0
        if edges is not None:
            return attend_documents(q, k, v, edges, dropout)
        attended = F.scaled_dot_product_attention(
            *(part.transpose(1, 2) for part in (q, k, v)),
            dropout_p=dropout,
            is_causal=True,
            enable_gqa=self.group_size > 1,
        )
        return attended.transpose(1, 2)


class MLP(nn.Module):
    """Two linear layers with a nonlinearity between; three with SwiGLU's gate."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        bias = not config.disable_bias_linear
        hidden, inner = config.hidden_size, config.ffn_size
        self.input = nn.Linear(hidden, inner, bias=bias)
        self.gate = nn.Linear(hidden, inner, bias=bias) if config.swiglu else None
        self.output = nn.Linear(inner, hidden, bias=bias)
        self.activation = make_activation(config)

    def forward(self, x: Tensor) -> Tensor:
        """x [B, S, H] → [B, S, H], through [B, S, F]."""
        if self.gate is None:
            return self.output(self.activation(self.input(x)))
        return self.output(self.activation(self.gate(x)) * self.input(x))


class Block(nn.Module):
    """Pre-LN transformer block: x + attention(norm(x)), then x + mlp(norm(x)).

    `call` runs `compute`: directly, or under activation checkpointing, inside any hooks on the
    block. With an fp32 residual stream the block must be given x in fp32, whatever its weights.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.norm1 = make_norm(config)
        self.attention = Attention(config)
        self.norm2 = make_norm(config)
        self.mlp = MLP(config)
        self.dropout = config.hidden_dropout
        self.residual_after_norm = config.apply_residual_connection_post_layernorm
        self.fp32_residual = config.fp32_residual_connection
        self.call = direct

    def forward(
        self,
        x: Tensor,
        rotary: Rotary | None = None,
        edges: Tensor | None = None,
        cache: LayerCache | None = None,
    ) -> Tensor:
        """x [B, S, H] → [B, S, H]; with a cache as written here: not compiled, nothing redone."""
        if cache is not None:
            return type(self).compute(self, x, rotary, edges, cache)
        return self.call(self.compute, x, rotary, edges)

    def compute(
        self,
        x: Tensor,
        rotary: Rotary | None = None,
        edges: Tensor | None = None,
        cache: LayerCache | None = None,
    ) -> Tensor:
        """The block itself, x [B, S, H] → [B, S, H]."""
        assert not self.fp32_residual or x.dtype == torch.float32, "the residual was narrowed"
        normal = normalized(self.norm1, x)
        x = self._add(x, normal, self.attention(normal, rotary, edges, cache))
        normal = normalized(self.norm2, x)
        return self._add(x, normal, self.mlp(normal))

    def _add(self, x: Tensor, normal: Tensor, branch: Tensor) -> Tensor:
        residual = normal if self.residual_after_norm else x
        if self.fp32_residual:
            residual = residual.float()
        return residual + F.dropout(branch, self.dropout, self.training)
