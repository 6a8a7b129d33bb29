"""The key-value cache: keys and values of earlier tokens, so that only new tokens are computed.

Latent attention stores one latent of a token instead, of which it can compute both.

Each row of the batch stores its tokens from slot 0 on, so the slot of a token is its position
whatever the lengths of the other rows. Prompts of different lengths are padded on the right. The
slots of padding are masked out for every real token, and are overwritten by later tokens. One rule
is therefore enough: a query at position p attends to the slots up to p.
Shapes: B rows, S new tokens, T slots in use, N query heads, K key-value heads, D channels of a
head.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_zpp.model.attention.prefix_attention import attend_last
from megatron_zpp.model.attention.scores import CAUSAL, Scores, attend_at


class KeyValueCache:
    """Memory for `num_slots` tokens in each of `num_rows` rows, allocated by the first write.

    Call `prepare` before each forward pass, then pass the cache to the model for exactly one.
    `positions` int64 [B, S] are those of the prepared tokens.
    """

    def __init__(self, num_layers: int, num_rows: int, num_slots: int) -> None:
        self.num_slots = num_slots
        self.lengths = [0] * num_rows  # tokens in each row, including the prepared ones
        self.layers = tuple(LayerCache(self) for _ in range(num_layers))
        self.positions = torch.zeros(num_rows, 0, dtype=torch.int64)
        self.mask: Tensor | None = None  # bool [B, 1, S, T]; None where all rows have the same
        self.last_columns = torch.zeros(num_rows, dtype=torch.int64)  # of the last real tokens
        self.num_used_slots = 0  # of the longest row
        self.was_empty = True  # before the prepared tokens

    def prepare(self, counts: Sequence[int], device: torch.device) -> "KeyValueCache":
        """Prepare for tokens [B, S] with counts[b] real ones first in row b, S = max(counts).

        Returns the cache. Raises ValueError for more tokens than there are slots.
        """
        num_columns, old_lengths = max(counts), self.lengths
        self.num_used_slots = max(old_lengths) + num_columns
        if self.num_used_slots > self.num_slots:
            raise ValueError(
                f"{self.num_used_slots} tokens, but the cache has {self.num_slots} slots"
            )
        self.was_empty = not any(old_lengths)
        self.lengths = [length + count for length, count in zip(old_lengths, counts, strict=True)]
        self.last_columns = torch.tensor(counts, device=device) - 1
        first_positions = torch.tensor(old_lengths, device=device)
        self.positions = first_positions[:, None] + torch.arange(num_columns, device=device)
        is_one_position = num_columns == 1 and len(set(old_lengths)) == 1
        self.mask = None
        if not (self.was_empty or is_one_position):
            slots = torch.arange(self.num_used_slots, device=device)
            self.mask = (slots <= self.positions[..., None])[:, None]
        return self

    def select_rows(self, rows: Sequence[int]) -> None:
        """Keep only the rows with these indices, in this order."""
        self.lengths = [self.lengths[row] for row in rows]
        for layer in self.layers:
            layer.select_rows(rows)

    def last_tokens(self, x: Tensor) -> Tensor:
        """Return the last real token of each row of x [B, S, H], as [B, 1, H]."""
        return x[torch.arange(len(x), device=x.device), self.last_columns][:, None]


class LayerCache:
    """The keys and values of one block, each [B, K, num_slots, D] in the dtype of the first."""

    def __init__(self, cache: KeyValueCache) -> None:
        self._cache = cache
        self._memory: Tensor | None = None  # [2, B, K, num_slots, D], or [1, ...] of latents

    @property
    def is_empty(self) -> bool:
        """Whether the prepared tokens are the first."""
        return self._cache.was_empty

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores = CAUSAL) -> Tensor:
        """Store k and v [B, S, K, D]; return attention of q [B, S, N, D] to all stored."""
        return self.attention(q, *self._extend(k, v), scores)

    def extend(self, latents: Tensor) -> Tensor:
        """Store latents [B, S, 1, D]; return all stored, [B, 1, T, D]."""
        return self._extend(latents)[0]

    def attention(self, q: Tensor, keys: Tensor, values: Tensor, scores: Scores) -> Tensor:
        """Map q [B, S, N, D] of the prepared tokens to [B, S, N, V].

        keys [B, K, T, D] and values [B, K, T, V] are those of all slots in use.
        """
        cache = self._cache
        rows, length, heads, channels = q.shape
        num_keys = keys.shape[1]
        if not scores.is_causal_only(cache.num_used_slots):
            return self._attend_by(scores, q.transpose(1, 2), keys, values).transpose(1, 2)
        if length == 1:  # the queries of a group take the place of tokens: no key is repeated
            grouped = q.view(rows, num_keys, heads // num_keys, channels)
            attended = F.scaled_dot_product_attention(
                grouped, keys, values, attn_mask=cache.mask, scale=scores.scale
            )
            return attended.reshape(rows, 1, heads, values.shape[-1])
        attended = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            keys,
            values,
            attn_mask=cache.mask,
            is_causal=cache.was_empty,
            enable_gqa=heads > num_keys,
            scale=scores.scale,
        )
        return attended.transpose(1, 2)

    def _attend_by(self, scores: Scores, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Map q [B, N, S, D] to [B, N, S, D]; keys and values [B, K, T, D]."""
        if self._cache.was_empty:
            return attend_last(q, keys, values, 0.0, scores)
        slots = torch.arange(keys.shape[2], device=q.device)
        distances = self._cache.positions[:, None, :, None] - slots  # [B, 1, S, T]
        return attend_at(q, keys, values, distances, scores)

    def select_rows(self, rows: Sequence[int]) -> None:
        """Keep only the rows with these indices, in this order."""
        if self._memory is not None:
            self._memory = self._memory[:, list(rows)]

    def _extend(self, *parts: Tensor) -> Tensor:
        """Store parts [B, S, K, D] of the prepared tokens; return all, [parts, B, K, T, D]."""
        cache, first = self._cache, parts[0]
        if self._memory is None:
            rows, _, heads, channels = first.shape
            # Zeros, as masked slots are multiplied by 0, and 0 times NaN is NaN.
            self._memory = first.new_zeros(len(parts), rows, heads, cache.num_slots, channels)
        rows = torch.arange(len(first), device=first.device)[:, None]
        for memory, new in zip(self._memory, parts, strict=True):
            memory.transpose(1, 2)[rows, cache.positions] = new
        return self._memory[:, :, :, : cache.num_used_slots]
