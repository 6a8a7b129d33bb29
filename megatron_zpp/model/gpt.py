"""The GPT: embedding, transformer blocks, final normalization, output layer, loss.

Built on the meta device it has no values; `megatron_zpp.model.init.initialize` draws them.
Shapes: B batch, S sequence, H hidden, V padded vocabulary.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_zpp.model.cache import KeyValueCache
from megatron_zpp.model.flops import flops_per_token
from megatron_zpp.model.layers import (
    Block,
    Rotary,
    apply_norm,
    call_directly,
    make_norm,
    rotary_table,
)
from megatron_zpp.model.loss import CrossEntropy, head_loss
from megatron_zpp.settings.config import ModelConfig, RecomputeConfig


class GPT(nn.Module):
    """Megatron's GPT-2, or by configuration a Llama; each of `blocks` is sharded by itself.

    The vocabulary is padded with entries that occur in no text. They take part in the softmax, as
    in Megatron, and training drives their probabilities to zero. `call` runs `blocks_per_call`
    blocks at a time, directly or with activation checkpointing. `logits` and `loss` compute the
    output layer from its input and its weight. `embed` is what comes before the blocks, `output`
    what comes after them.
    """

    def __init__(self, config: ModelConfig, vocab_size: int) -> None:
        super().__init__()
        self.config = config
        self.vocab_size = vocab_size
        self.padded_vocab_size = config.padded_vocab_size(vocab_size)
        hidden = config.hidden_size
        self.tokens = nn.Embedding(self.padded_vocab_size, hidden)
        self.positions = None
        if config.position_embedding_type == "learned_absolute":
            self.positions = nn.Embedding(config.num_positions, hidden)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = make_norm(config)
        self.head = None
        if config.untie_embeddings_and_output_weights:
            self.head = nn.Linear(hidden, self.padded_vocab_size, bias=False)
        self.cross_entropy: CrossEntropy | None = None
        self.logits, self.loss = F.linear, head_loss
        self.call = call_directly
        self.blocks_per_call = config.num_layers

    def forward(
        self,
        tokens: Tensor,
        labels: Tensor | None = None,
        loss_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        edges: Tensor | None = None,
        cache: KeyValueCache | None = None,
    ) -> Tensor:
        """Return logits [B, S, V] of tokens int64 [B, S]; with labels, the mean loss, fp32 scalar.

        The loss is Σ(loss·mask)/Σmask with labels and loss_mask [B, S]; the mask is all ones if
        None. position_ids [B, S] count from 0 in each row if None. `edges` int32 [n + 1] says where
        documents begin in the concatenated rows; tokens then attend to their own document only.
        Raises ValueError for more tokens than learned positions.

        With a cache, after `cache.prepare` for these tokens, they continue the cached ones, and the
        result is logits [B, 1, V] of each row's last real token.
        """
        if cache is not None:
            position_ids = cache.positions
        x = self.embed(tokens, position_ids)  # [B, S, H]
        rotary = self._rotary(tokens, position_ids)
        for first in range(0, len(self.blocks), self.blocks_per_call):
            x = self.call(self._run_blocks, first, x, rotary, edges, cache)
        return self.output(x, labels, loss_mask, cache)

    def embed(self, tokens: Tensor, position_ids: Tensor | None) -> Tensor:
        """Return what the first block is called with, [B, S, H]."""
        x = self.tokens(tokens)
        if self.positions is not None:
            length = tokens.shape[1]
            if length > self.config.num_positions:
                raise ValueError(f"{length} tokens, but {self.config.num_positions} positions")
            if position_ids is None:
                x = x + self.positions.weight[:length]
            else:
                x = x + self.positions(position_ids)
        if self.config.fp32_residual_connection:
            x = x.float()
        return F.dropout(x, self.config.hidden_dropout, self.training)

    def output(
        self,
        x: Tensor,
        labels: Tensor | None,
        loss_mask: Tensor | None,
        cache: KeyValueCache | None,
    ) -> Tensor:
        """Return logits or loss, as `forward` does, of what the last block returned [B, S, H]."""
        if cache is not None:
            x = cache.last_tokens(x)
        x = apply_norm(self.norm, x)
        weight = self.tokens.weight if self.head is None else self.head.weight
        if labels is None:
            return self.logits(x, weight)
        mask = torch.ones(1, device=x.device) if loss_mask is None else loss_mask
        mask = mask.expand(labels.shape)
        return self.loss(
            x.flatten(0, 1), weight, labels.flatten(), mask.flatten(), self.cross_entropy
        )

    def num_parameters(self, *, trained_only: bool = False) -> int:
        """Return the number of weights of the whole model, also where it is sharded."""
        weights = (each for each in self.parameters() if each.requires_grad or not trained_only)
        return sum(weight.numel() for weight in weights)

    def flops_per_token(self) -> float:
        """Return the model FLOPs of forward and backward for one token of a full sequence.

        3 · (2 · P + 4 · L · S · N · D): P weights of all matrix products, the output layer
        included; L blocks; S = seq_length; N · D the width of the query heads. A backward pass
        counts as two forward passes. Attention counts the whole sequence for every token, as PaLM
        and Megatron do. Recomputation is not counted.
        """
        return flops_per_token(self.config, RecomputeConfig(), self.vocab_size)

    def _rotary(self, tokens: Tensor, position_ids: Tensor | None) -> Rotary | None:
        if self.config.position_embedding_type != "rope":
            return None
        if position_ids is None:
            position_ids = torch.arange(tokens.shape[1], device=tokens.device)[None]
        channels = int(self.config.head_dim * self.config.rotary_percent)
        scaling_factor = self.config.rope_scaling_factor if self.config.use_rope_scaling else None
        return rotary_table(position_ids, channels, self.config.rotary_base, scaling_factor)

    def _run_blocks(
        self,
        first: int,
        x: Tensor,
        rotary: Rotary | None,
        edges: Tensor | None,
        cache: KeyValueCache | None,
    ) -> Tensor:
        """Run the blocks of one `call`, from block `first`."""
        for index, block in enumerate(self.blocks[first : first + self.blocks_per_call], first):
            layer_cache = None if cache is None else cache.layers[index]
            x = block(x, rotary, edges, layer_cache)
        return x
