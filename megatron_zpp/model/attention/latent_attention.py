"""Multi-head latent attention: keys and values of all heads come from one latent of a token.

    latent, turned key = split(x A)           keys, values = split(norm(latent) B), by heads

(DeepSeek-V2, Liu et al. 2024, section 2.1). A head's query and key have channels without positions,
and some that rotary positions turn; the turned key is the same for all heads. Queries may come from
a latent of their own.
Shapes: B batch, S sequence, T cached tokens, H hidden, N query heads; L channels of the latent, R
turned channels, C other channels of a query, V channels of a value.
"""

import torch
from torch import Tensor

from megatron_zpp.model.attention.attention import CoreAttention
from megatron_zpp.model.attention.cache import LayerCache
from megatron_zpp.model.attention.rotary import Rotary, rotate
from megatron_zpp.model.attention.sequences import WHOLE_ROWS, Sequences
from megatron_zpp.model.normalization import apply_norm, make_norm
from megatron_zpp.model.part import WHOLE, Part
from megatron_zpp.model.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    WholeLinear,
)
from megatron_zpp.parallel.axes import enter
from megatron_zpp.settings.config import ModelConfig
from zeropp.optim import local_part

EPSILON = 1e-6  # of the norms of latents, whatever the other norms have


class LatentAttention(CoreAttention):
    """Causal self-attention whose keys and values are computed from one latent of a token.

    The rows of `q` or `q_up` are ordered by heads, [N, C + R], as those of `kv_up` are, [N, C + V];
    the rows of `kv_down` are [L + R]. Tensor ranks have some heads each, and the latents whole;
    where they have some rows each, they compute the latents of these.
    """

    def __init__(self, config: ModelConfig, layer: int = 0, part: Part = WHOLE) -> None:
        super().__init__(config, layer, part)
        hidden, rank, latent = config.hidden_size, config.q_lora_rank, config.kv_lora_rank
        axis, all_heads, bias = part.tensor, config.num_attention_heads, config.has_qkv_bias
        self.heads = all_heads if axis is None else all_heads // axis.size
        self.plain, self.turned = config.qk_head_dim, config.qk_pos_emb_head_dim  # C and R
        self.latent = latent
        self.q = self.q_down = self.q_down_norm = self.q_up = self.kv_down_norm = None
        width = all_heads * config.head_dim
        if rank is None:
            self.q = ColumnParallelLinear(hidden, width, False, axis)
        else:
            self.q_down = WholeLinear(hidden, rank, bias)
            self.q_up = ColumnParallelLinear(rank, width, False, axis)
        self.kv_down = WholeLinear(hidden, latent + self.turned, bias)
        width = all_heads * (self.plain + config.v_head_dim)
        self.kv_up = ColumnParallelLinear(latent, width, False, axis)
        if config.qk_layernorm:
            self.kv_down_norm = make_norm(config, latent, part.norms, EPSILON)
            if rank is not None:
                self.q_down_norm = make_norm(config, rank, part.norms, EPSILON)
        latents = ("q_down", "q_down_norm", "kv_down", "kv_down_norm")
        self.grad_is_partial = latents if part.splits_rows else ()
        width, bias = all_heads * config.v_head_dim, config.has_attention_output_bias
        self.output = RowParallelLinear(width, hidden, bias, axis, part.splits_rows)

    def forward(self, x: Tensor, sequences: Sequences = WHOLE_ROWS) -> Tensor:
        """Map x [B, S, H] to [B, S, H]."""
        splits_rows, rotary = sequences.splits_rows, sequences.rotary[self.rotary_kind]
        q, latent = self._queries(x, splits_rows, rotary), self._latents(x, splits_rows, rotary)
        if sequences.cache is None:
            attended = self.attended(q, *self._keys_and_values(latent), sequences)
        else:
            attended = self._continued(q, latent, sequences.cache.layers[self.layer])
        return self.output(attended.flatten(2), splits_rows)

    def _queries(self, x: Tensor, splits_rows: bool, rotary: Rotary | None) -> Tensor:
        """Return the queries [B, S, N, C + R] of x [B, S, H]."""
        if self.q is not None:
            q = self.q(self._entered(x, splits_rows))
        else:
            latent = self.q_down(x)
            if self.q_down_norm is not None:
                latent = apply_norm(self.q_down_norm, latent)
            q = self.q_up(self._entered(latent, splits_rows))
        return self._with_turned(q.unflatten(-1, (self.heads, -1)), self.plain, rotary)

    def _latents(self, x: Tensor, splits_rows: bool, rotary: Rotary | None) -> Tensor:
        """Return the latents and the turned keys of x [B, S, H], [B, S, L + R]."""
        latent = self.kv_down(x)
        if self.kv_down_norm is not None:
            latent, key = latent.split((self.latent, self.turned), dim=-1)
            latent = torch.cat((apply_norm(self.kv_down_norm, latent), key), dim=-1)
        latent = self._entered(latent, splits_rows)
        return self._with_turned(latent[:, :, None], self.latent, rotary)[:, :, 0]

    def _entered(self, x: Tensor, splits_rows: bool) -> Tensor:
        return x if self.axis is None else enter(x, self.axis, splits_rows)

    def _with_turned(self, x: Tensor, plain: int, rotary: Rotary | None) -> Tensor:
        """Return x [B, S, heads, plain + R] with its last R channels turned."""
        if rotary is None:
            return x
        plain, turned = x.split((plain, self.turned), dim=-1)
        turned = rotate(turned[:, :, None], rotary, is_interleaved=True)[:, :, 0]
        return torch.cat((plain, turned), dim=-1)

    def _keys_and_values(self, latent: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys [B, S, N, C + R] and values [B, S, N, V] of latents [B, S, L + R]."""
        latent, turned = latent.split((self.latent, self.turned), dim=-1)
        both = self.kv_up(latent).unflatten(-1, (self.heads, -1))
        plain, v = both.split((self.plain, both.shape[-1] - self.plain), dim=-1)
        turned = turned[:, :, None].expand(-1, -1, self.heads, -1)
        return torch.cat((plain, turned), dim=-1), v

    def _continued(self, q: Tensor, latent: Tensor, cache: LayerCache) -> Tensor:
        """Return attention [B, S, N, V] of q [B, S, N, C + R] to the cached tokens and these.

        Later tokens attend to the latents themselves, which take the place of keys and values: q is
        multiplied by the rows of `kv_up` for keys, and what is attended by those for values.
        """
        was_empty = cache.is_empty
        cached = cache.extend(latent[:, :, None])  # [B, 1, T, L + R]
        if was_empty:
            return self.core(q, *self._keys_and_values(latent))
        if self.kv_up.delta is not None:
            both = self._keys_and_values(cached[:, 0])
            keys, values = (each.transpose(1, 2) for each in both)
            return cache.attention(q, keys, values, self.scores_of(q))
        weight = local_part(self.kv_up.weight).unflatten(0, (self.heads, -1))  # [N, C + V, L]
        for_keys, for_values = weight.split((self.plain, weight.shape[1] - self.plain), dim=1)
        plain, turned = q.split((self.plain, self.turned), dim=-1)
        plain = torch.einsum("bsnc,ncl->bsnl", plain, for_keys)
        q = torch.cat((plain, turned), dim=-1)
        attended = cache.attention(q, cached, cached[..., : self.latent], self.scores_of(q))
        return torch.einsum("bsnl,nvl->bsnv", attended, for_values)
