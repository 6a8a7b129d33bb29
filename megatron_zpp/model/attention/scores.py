"""What a layer's attention does beyond causal softmax(q·k / √D): windows, ALiBi, caps, sinks.

PyTorch's kernels take windows and ALiBi as a mask. A mask for R of S tokens would be R x S, so
queries are taken in blocks, each with the keys that it can see. A cap is computed without a kernel.
An attention sink (Xiao et al. 2023, section 3.3; learned by head as in gpt-oss, OpenAI 2025) is one
more score of each head in the softmax, which weighs no value: for kernels, one more key.
Shapes: B rows, N query heads, K key-value heads, Q = N/K, R queries, T keys, D channels of a head.
"""

import math
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_zpp.settings.config import ModelConfig
from zeropp.wire import RankGroup

BLOCK = 512  # queries
WIDTH_MULTIPLE = 8  # of a head's channels, for fused kernels


@dataclass(frozen=True, kw_only=True)
class Scores:
    """How a layer turns queries and keys into scores.

    window: keys that a query sees, its own included. cap: c of c·tanh(x / c). scale: of q·k, None
    for 1 / √D. `alibi_heads`, of ALiBi (Press et al. 2022), are the number of query heads of the
    model, and the first and the number of those that this rank has. sinks [N]: one more score of
    each of this rank's heads.
    """

    window: int | None = None
    cap: float | None = None
    scale: float | None = None
    alibi_heads: tuple[int, int, int] | None = None
    sinks: Tensor | None = None

    @classmethod
    def of(cls, config: ModelConfig, layer: int, axis: RankGroup | None = None) -> "Scores":
        """Return the scores of layer number `layer` of a model, of a rank's heads on an axis."""
        heads, scalar = config.num_attention_heads, config.query_pre_attn_scalar
        scale = None if scalar is None else scalar**-0.5
        if config.multi_latent_attention:
            is_yarn = config.rope_type == "yarn"
            growth = config.yarn_growth(config.mscale_all_dim) if is_yarn else 1.0
            scale = growth * growth * config.score_scalar**-0.5
        count, place = (heads, 0) if axis is None else (heads // axis.size, axis.index)
        has_alibi = config.position_embedding_type == "alibi"
        return cls(
            window=config.windows[layer],
            cap=config.attn_logit_softcapping,
            scale=scale,
            alibi_heads=(heads, place * count, count) if has_alibi else None,
        )

    def is_causal_only(self, num_keys: int) -> bool:
        """Whether scores of `num_keys` keys are q·k times the scale, with a causal mask."""
        return self.sinks is None and self.is_causal_beside_sinks(num_keys)

    def is_causal_beside_sinks(self, num_keys: int) -> bool:
        """Whether they are that, perhaps with sinks."""
        fits = self.window is None or self.window >= num_keys
        return fits and self.cap is None and self.alibi_heads is None


CAUSAL = Scores()


def with_sink_key(
    q: Tensor, k: Tensor, v: Tensor, scores: Scores
) -> tuple[Tensor, Tensor, Tensor, Scores]:
    """Return queries, keys and values of which one more key, the first, stands for the sinks.

    Its value is zero, and its score is the sink of the query's head: queries have that in a channel
    of their own, which is 1 in this key and 0 in all others. q [B, N, R, D], k [B, K, T, D] and
    v [B, K, T, V] become [B, N, R, W], [B, K, T + 1, W] and [B, K, T + 1, W], as fused kernels want
    a width that is a multiple of 8. The scores returned have the scale of D, no sinks, and no
    window, which the mask has to have instead.
    """
    channels = q.shape[-1]
    scale = scores.scale or channels**-0.5
    width = -(-(channels + 1) // WIDTH_MULTIPLE) * WIDTH_MULTIPLE
    q, k = F.pad(q, (0, width - channels)), F.pad(k, (0, width - channels, 1, 0))
    q[..., channels] = scores.sinks[:, None] / scale
    k[:, :, 0, channels] = 1
    v = F.pad(v, (0, width - v.shape[-1], 1, 0))
    return q, k, v, replace(scores, scale=scale, sinks=None, window=None)


def attend_in_blocks(q: Tensor, k: Tensor, v: Tensor, scores: Scores, dropout: float) -> Tensor:
    """Map q [B, N, R, D] of the last R of T tokens to [B, N, R, D]; k and v [B, K, T, D]."""
    attended, end = [], k.shape[2] - q.shape[2]
    for block in q.split(BLOCK, dim=2):
        first, end = end, end + block.shape[2]
        start = 0 if scores.window is None else max(0, first + 1 - scores.window)
        queries = torch.arange(first, end, device=q.device)
        distances = queries[:, None] - torch.arange(start, end, device=q.device)
        keys, values = k[:, :, start:end], v[:, :, start:end]
        attended.append(attend_at(block, keys, values, distances, scores, dropout))
    return torch.cat(attended, dim=2)


def attend_at(
    q: Tensor, k: Tensor, v: Tensor, distances: Tensor, scores: Scores, dropout: float = 0.0
) -> Tensor:
    """Map q [B, N, R, D] to [B, N, R, D]; k and v [B, K, T, D].

    distances [R, T] or [B, 1, R, T]: by how many tokens a key is before a query. Keys after it, and
    those before the window, are not seen.
    """
    is_hidden = distances < 0
    if scores.window is not None:
        is_hidden = is_hidden | (distances >= scores.window)
    bias = torch.zeros((), dtype=q.dtype, device=q.device)
    if scores.alibi_heads is not None:
        bias = -alibi_slopes(*scores.alibi_heads, q.device)[:, None, None] * distances
    bias = bias.to(q.dtype).masked_fill(is_hidden, float("-inf"))
    if scores.sinks is not None:
        width, (q, k, v, scores) = v.shape[-1], with_sink_key(q, k, v, scores)
        bias = F.pad(bias, (1, 0))  # all queries see it
        return _masked(q, k, v, bias, scores, dropout)[..., :width]
    return _masked(q, k, v, bias, scores, dropout)


def _masked(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scores: Scores, dropout: float
) -> Tensor:
    """Map q [B, N, R, D] to [B, N, R, V], adding bias [..., R, T] to the scores."""
    if scores.cap is None:
        return F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=bias,
            dropout_p=dropout,
            scale=scores.scale,
            enable_gqa=q.shape[1] > k.shape[1],
        )
    groups, scale = (k.shape[1], -1), scores.scale or q.shape[-1] ** -0.5
    products = (q.unflatten(1, groups) @ k[:, :, None].transpose(-1, -2)).flatten(1, 2) * scale
    capped = scores.cap * torch.tanh(products / scores.cap) + bias
    weights = capped.softmax(dim=-1, dtype=torch.float32).to(q.dtype)
    weights = F.dropout(weights, dropout)
    return (weights.unflatten(1, groups) @ v[:, :, None]).flatten(1, 2)


def alibi_slopes(num_heads: int, first: int, count: int, device: torch.device) -> Tensor:
    """Return the slopes [count] of the heads from `first` on of a model with `num_heads`, in fp32.

    For a power of two n they are 2^(-8/n), 2^(-16/n), ...; for other numbers those of the next
    smaller power, followed by every second one of the next larger power.
    """
    power = 2 ** math.floor(math.log2(num_heads))
    heads = torch.arange(1, power + 1, device=device, dtype=torch.float32)
    rest = 1 + 2 * torch.arange(num_heads - power, device=device, dtype=torch.float32)
    exponents = torch.cat((heads * (8 / power), rest * (4 / power)))
    return torch.exp2(-exponents)[first : first + count]
