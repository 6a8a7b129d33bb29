"""Keys and values of the tokens seen so far: a new token then costs the work of one token.

A row of the batch keeps its tokens from slot 0 on, so the slot of a token is its position, whatever
the lengths of the other rows. Prompts of different lengths come padded on the right: what padding
leaves in a slot is seen by no real token, and is overwritten before one gets there. So one rule
serves all: a query at position p sees the slots up to p.
Legend of the shapes: B rows, S new tokens, T slots in use, N query heads, K key-value heads, D.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


class KeyValueCache:
    """Memory for `num_slots` tokens in each of `num_rows` rows; taken when first written to.

    Each forward pass is announced by `expect`. `positions` int64 [B, S] are then those of its
    tokens; the same object, given to the model, must see exactly one forward pass.
    """

    def __init__(self, num_layers: int, num_rows: int, num_slots: int) -> None:
        self.num_slots = num_slots
        self.lengths = [0] * num_rows
        self.layers = tuple(LayerCache(self) for _ in range(num_layers))
        self.positions = torch.zeros(num_rows, 0, dtype=torch.int64)
        self.mask: Tensor | None = None  # bool [B, 1, S, T]; None where all rows see alike
        self.ends = torch.zeros(num_rows, dtype=torch.int64)
        self.used = 0  # slots, of the longest row
        self.is_fresh = True  # nothing was kept before this pass

    def expect(self, counts: Sequence[int], device: torch.device) -> "KeyValueCache":
        """Announce tokens [B, S], of which the first counts[b] of row b are real; S = max(counts).

        Raises ValueError for more tokens than there are slots.
        """
        width, starts = max(counts), self.lengths
        self.used = max(starts) + width
        if self.used > self.num_slots:
            raise ValueError(f"{self.used} tokens, but the cache has {self.num_slots} slots")
        self.is_fresh = not any(starts)
        self.lengths = [start + count for start, count in zip(starts, counts, strict=True)]
        self.ends = torch.tensor(counts, device=device) - 1
        begin = torch.tensor(starts, device=device)
        self.positions = begin[:, None] + torch.arange(width, device=device)
        alike = width == 1 and len(set(starts)) == 1
        self.mask = None
        if not (self.is_fresh or alike):
            slots = torch.arange(self.used, device=device)
            self.mask = (slots <= self.positions[..., None])[:, None]
        return self

    def keep(self, rows: Sequence[int]) -> None:
        """Go on with these rows only, in this order."""
        self.lengths = [self.lengths[row] for row in rows]
        for layer in self.layers:
            layer.keep(rows)

    def last(self, x: Tensor) -> Tensor:
        """Of x [B, S, H] each row's last real token, [B, 1, H]."""
        return x[torch.arange(len(x), device=x.device), self.ends][:, None]


class LayerCache:
    """The keys and values of one block, each [B, K, num_slots, D] in the type they come in."""

    def __init__(self, cache: KeyValueCache) -> None:
        self._cache = cache
        self._memory: Tensor | None = None  # [2, B, K, num_slots, D]

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Keep k and v [B, S, K, D]; attention of q [B, S, N, D] to all that is kept, like q."""
        cache = self._cache
        self._write(k, v)
        keys, values = self._memory[:, :, :, : cache.used]
        rows, length, heads, channels = q.shape
        if length == 1:  # the queries of a group as if they were tokens: no key is repeated
            grouped = q.view(rows, k.shape[2], heads // k.shape[2], channels)
            attended = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=cache.mask)
            return attended.reshape(q.shape)
        attended = F.scaled_dot_product_attention(
            q.transpose(1, 2), keys, values, attn_mask=cache.mask, is_causal=cache.is_fresh,
            enable_gqa=heads > k.shape[2],
        )  # fmt: skip
        return attended.transpose(1, 2)

    def keep(self, rows: Sequence[int]) -> None:
        """Go on with these rows only."""
        if self._memory is not None:
            self._memory = self._memory[:, list(rows)]

    def _write(self, k: Tensor, v: Tensor) -> None:
        cache = self._cache
        if self._memory is None:
            rows, _, heads, channels = k.shape
            # Zeros: a slot that is masked out still takes part, times 0, and 0 times NaN is NaN.
            self._memory = k.new_zeros(2, rows, heads, cache.num_slots, channels)
        rows = torch.arange(len(k), device=k.device)[:, None]
        for memory, new in zip(self._memory, (k, v), strict=True):
            memory.transpose(1, 2)[rows, cache.positions] = new
