"""The key-value cache: keys and values of earlier tokens, so that only new tokens are computed.

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
        self._memory: Tensor | None = None  # [2, B, K, num_slots, D]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores = CAUSAL) -> Tensor:
        """Store k and v [B, S, K, D]; return attention of q [B, S, N, D] to all stored."""
        cache = self._cache
        self._write(k, v)
        keys, values = self._memory[:, :, :, : cache.num_used_slots]
        rows, length, heads, channels = q.shape
        if not scores.is_causal_only(cache.num_used_slots):
            return self._attend_by(scores, q.transpose(1, 2), keys, values).transpose(1, 2)
        if length == 1:  # the queries of a group take the place of tokens: no key is repeated
            grouped = q.view(rows, k.shape[2], heads // k.shape[2], channels)
            attended = F.scaled_dot_product_attention(
                grouped, keys, values, attn_mask=cache.mask, scale=scores.scale
            )
            return attended.reshape(q.shape)
        attended = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            keys,
            values,
            attn_mask=cache.mask,
            is_causal=cache.was_empty,
            enable_gqa=heads > k.shape[2],
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

    def _write(self, k: Tensor, v: Tensor) -> None:
        cache = self._cache
        if self._memory is None:
            rows, _, heads, channels = k.shape
            # Zeros, as masked slots are multiplied by 0, and 0 times NaN is NaN.
            self._memory = k.new_zeros(2, rows, heads, cache.num_slots, channels)
        rows = torch.arange(len(k), device=k.device)[:, None]
        for memory, new in zip(self._memory, (k, v), strict=True):
            memory.transpose(1, 2)[rows, cache.positions] = new
