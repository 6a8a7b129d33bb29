"""The layers of a GPT: normalization, rotary positions, attention, MLP, and transformer block.

Shapes: B batch, S sequence, H hidden, F hidden of the MLP, N query heads, K key-value
heads, Q = N/K query heads of one group, D channels of a head, R of them rotated by position.
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

# Llama 3.1's scaling of rotary positions: wavelengths per context of the first training.
LOW_FREQ_FACTOR, HIGH_FREQ_FACTOR = 1.0, 4.0
ORIGINAL_POSITIONS = 8192  # context of the first training, in tokens
Rotary = tuple[Tensor, Tensor]  # cosines and signed sines, each [B or 1, S, 1, 1, R] in fp32


def call_directly(function: Callable[..., Tensor], *arguments: object) -> Tensor:
    """Return `function(*arguments)`; activation checkpointing replaces this caller by its own."""
    return function(*arguments)


def make_norm(config: ModelConfig) -> nn.Module:
    """Return a normalization over H; it computes in fp32 whatever the dtype of its input."""
    norm_class = {"LayerNorm": nn.LayerNorm, "RMSNorm": nn.RMSNorm}[config.normalization]
    return norm_class(config.hidden_size, eps=config.layernorm_epsilon)


def apply_norm(norm: nn.Module, x: Tensor) -> Tensor:
    """Return `norm(x)` [B, S, H] in the dtype of the gains, to which an fp32 residual is cast."""
    return norm(x.to(norm.weight.dtype))


def make_activation(config: ModelConfig) -> Callable[[Tensor], Tensor]:
    """Return the MLP's nonlinearity: OpenAI's GELU is the tanh form, exact GELU the erf form."""
    if config.swiglu:
        return F.silu
    if config.squared_relu:
        return squared_relu
    is_approximate = config.openai_gelu or config.bias_gelu_fusion
    return partial(F.gelu, approximate="tanh" if is_approximate else "none")


def squared_relu(x: Tensor) -> Tensor:
    """Return max(x, 0)² (So et al. 2021, Primer)."""
    return F.relu(x).square()


def rotary_table(
    positions: Tensor, channels: int, base: float, scaling_factor: float | None = None
) -> Rotary:
    """Return cosines and signed sines for `rotate` (Su et al. 2021, halves instead of pairs).

    positions: integers [B or 1, S]; channels: R. With a `scaling_factor` the frequencies are those
    of `scale_frequencies`. The sines of the first half of the channels are negated.
    """
    exponents = torch.arange(0, channels, 2, device=positions.device, dtype=torch.float32)
    frequencies = 1.0 / base ** (exponents / channels)  # [R/2]
    if scaling_factor is not None:
        frequencies = scale_frequencies(frequencies, scaling_factor)
    angles = positions[:, :, None, None, None].float() * frequencies  # [B, S, 1, 1, R/2]
    cosines, sines = angles.cos(), angles.sin()
    return torch.cat((cosines, cosines), dim=-1), torch.cat((-sines, sines), dim=-1)


def scale_frequencies(frequencies: Tensor, factor: float) -> Tensor:
    """Scale rotary frequencies [R/2], in radians per position, as Llama 3.1 does.

    Over the original positions, frequencies of at most LOW_FREQ_FACTOR wavelengths are divided by
    `factor`, those of at least HIGH_FREQ_FACTOR stay, and those between are interpolated.
    """
    wavelengths = ORIGINAL_POSITIONS * frequencies / (2 * math.pi)
    smooth = (wavelengths - LOW_FREQ_FACTOR) / (HIGH_FREQ_FACTOR - LOW_FREQ_FACTOR)
    unscaled_share = smooth.clamp(0, 1)
    return frequencies * (unscaled_share + (1 - unscaled_share) / factor)


def rotate(x: Tensor, rotary: Rotary) -> Tensor:
    """Rotate channels i and i + R/2 of x [B, S, K, heads, D] as a pair, for i < R/2, in fp32."""
    cosines, sines = rotary
    channels = cosines.shape[-1]
    pairs, rest = x.split((channels, x.shape[-1] - channels), dim=-1)
    pairs = pairs.float()
    # Not addcmul: Hugging Face's models round the product before the sum.
    rotated = pairs * cosines + pairs.roll(channels // 2, dims=-1) * sines
    rotated = rotated.to(x.dtype)
    return rotated if rest.shape[-1] == 0 else torch.cat((rotated, rest), dim=-1)


class Attention(nn.Module):
    """Causal self-attention with grouped queries and one matrix for queries, keys and values.

    The rows of that matrix are ordered by groups, [K, Q + 2, D]: the query heads of a group, then
    its key and its value. Any slice of whole groups is therefore an attention layer itself.
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
        self.call = call_directly

    def forward(
        self,
        x: Tensor,
        rotary: Rotary | None = None,
        edges: Tensor | None = None,
        cache: LayerCache | None = None,
    ) -> Tensor:
        """Map x [B, S, H] to [B, S, H]; `edges` int32 [n + 1] limit attention to each document.

        With a cache, x are new tokens, which also attend to the tokens in the cache.
        """
        queries = self.group_size
        shape = (*x.shape[:2], self.kv_heads, queries + 2, self.head_dim)
        qkv = self.qkv(x).view(shape)  # [B, S, K, Q + 2, D]
        if rotary is None:
            q, k, v = qkv.split((queries, 1, 1), dim=3)
        else:
            qk, v = qkv.split((queries + 1, 1), dim=3)
            q, k = rotate(qk, rotary).split((queries, 1), dim=3)
        q, k, v = (part.flatten(2, 3) for part in (q, k, v))
        if cache is not None:
            return self.output(cache.attend(q, k, v).flatten(2))
        attended = self.call(self.attend, q, k, v, edges)
        return self.output(attended.flatten(2))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, edges: Tensor | None = None) -> Tensor:
        """Map q [B, S, N, D], k and v [B, S, K, D] to [B, S, N, D]; the softmax is in fp32."""
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
    """Two linear layers with a nonlinearity between them; SwiGLU adds a third, the gate."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        bias = not config.disable_bias_linear
        hidden, ffn = config.hidden_size, config.ffn_size
        self.input = nn.Linear(hidden, ffn, bias=bias)
        self.gate = nn.Linear(hidden, ffn, bias=bias) if config.swiglu else None
        self.output = nn.Linear(ffn, hidden, bias=bias)
        self.activation = make_activation(config)

    def forward(self, x: Tensor) -> Tensor:
        """Map x [B, S, H] to [B, S, H], through [B, S, F]."""
        if self.gate is None:
            return self.output(self.activation(self.input(x)))
        return self.output(self.activation(self.gate(x)) * self.input(x))


class Block(nn.Module):
    """Pre-LN transformer block: x + attention(norm(x)), then x + mlp(norm(x)).

    `call` runs `compute`, directly or with activation checkpointing, inside the block's hooks. With
    an fp32 residual stream x must be fp32 whatever the dtype of the weights.
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
        self.call = call_directly

    def forward(
        self,
        x: Tensor,
        rotary: Rotary | None = None,
        edges: Tensor | None = None,
        cache: LayerCache | None = None,
    ) -> Tensor:
        """Map x [B, S, H] to [B, S, H]; with a cache neither compiled nor recomputed."""
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
        """Map x [B, S, H] to [B, S, H], without `call`."""
        if self.fp32_residual:
            assert x.dtype == torch.float32, "the fp32 residual was cast to 16 bit"
        normalized = apply_norm(self.norm1, x)
        x = self._add(x, normalized, self.attention(normalized, rotary, edges, cache))
        normalized = apply_norm(self.norm2, x)
        return self._add(x, normalized, self.mlp(normalized))

    def _add(self, x: Tensor, normalized: Tensor, branch: Tensor) -> Tensor:
        residual = normalized if self.residual_after_norm else x
        if self.fp32_residual:
            residual = residual.float()
        return residual + F.dropout(branch, self.dropout, self.training)
