"""The GPT: embedding, transformer blocks, final normalization, output layer, loss.

Built on the meta device it has no values; `megatron_zpp.model.init.initialize` draws them.
Shapes: B batch, S sequence, H hidden, V padded vocabulary.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_zpp.model.attention.attention import Attention
from megatron_zpp.model.attention.cache import KeyValueCache
from megatron_zpp.model.attention.latent_attention import LatentAttention
from megatron_zpp.model.attention.rotary import Rotary, query_scale, rotary_tables
from megatron_zpp.model.attention.sequences import WHOLE_ROWS, PassRecord, Sequences
from megatron_zpp.model.loss import cap_logits, head_loss, parallel_cross_entropy
from megatron_zpp.model.mlp import feed_forward
from megatron_zpp.model.normalization import apply_norm, make_norm
from megatron_zpp.model.part import WHOLE, Part
from megatron_zpp.model.tensor_parallel import ColumnParallelLinear, VocabParallelEmbedding
from megatron_zpp.parallel.axes import enter, own_tokens
from megatron_zpp.parallel.collectives import gather_columns, gather_rows, moved, own_rows
from megatron_zpp.settings.config import ModelConfig
from zeropp.optim import local_part

NORMS = ("norm1", "post_norm1", "norm2", "post_norm2")


class Block(nn.Module):
    """Transformer block: a branch of attention, then one of the MLP, each added to the stream x.

    By default each is normalized before (pre-LN): x + attention(norm1(x)), then x + mlp(norm2(x));
    by `norm_placement` behind, before it is added, or on both sides. Parallel, both start from the
    same x, perhaps normalized once for both. The execution of the model's part runs `compute`
    inside the block's hooks. With an fp32 residual stream x must be fp32 whatever the dtype of the
    weights. Where rows are split, x has those of this rank.
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
        self.dropout, self.multiplier = config.hidden_dropout, config.residual_multiplier
        self.is_parallel = config.use_parallel_residual
        self.shares_norm = self.is_parallel and config.parallel_residual_single_norm
        self.residual_after_norm = config.apply_residual_connection_post_layernorm
        self.fp32_residual = config.fp32_residual_connection
        self.execution, self.is_recomputed = part.execution, is_recomputed
        attention = LatentAttention if config.multi_latent_attention else Attention
        self.norm1 = make_norm(config, norms=part.norms) if has_norm else None
        self.attention = attention(config, layer, part)
        self.post_norm1 = make_norm(config, norms=part.norms) if has_post_norm else None
        has_norm2 = has_norm and not self.shares_norm
        self.norm2 = make_norm(config, norms=part.norms) if has_norm2 else None
        self.mlp = feed_forward(config, layer)(config, layer, part)
        self.post_norm2 = make_norm(config, norms=part.norms) if has_post_norm else None
        self.grad_is_partial = NORMS if part.splits_rows else ()

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
            entered = normalized if self.shares_norm else self._enter(self.norm2, x)
            branch = self.mlp(entered, sequences)
            branch = self._leave(self.post_norm2, branch)
            return self._residual(x, normalized) + (branch + attended)
        x = self._residual(x, normalized) + attended
        normalized = self._enter(self.norm2, x)
        branch = self._leave(self.post_norm2, self.mlp(normalized, sequences))
        return self._residual(x, normalized) + branch

    def _enter(self, norm: nn.Module | None, x: Tensor) -> Tensor:
        """Return what a branch is computed of, in the dtype of its weights."""
        normalized = x if norm is None else apply_norm(norm, x)
        return normalized.to(self.attention.output.weight.dtype)

    def _leave(self, norm: nn.Module | None, branch: Tensor) -> Tensor:
        """Return what a branch adds to the stream."""
        branch = branch if norm is None else apply_norm(norm, branch)
        if self.multiplier != 1:
            branch = branch * self.multiplier
        return F.dropout(branch, self.dropout, self.training)

    def _residual(self, x: Tensor, normalized: Tensor) -> Tensor:
        residual = normalized if self.residual_after_norm else x
        return residual.float() if self.fp32_residual else residual


class GPT(nn.Module):
    """Megatron's GPT-2, or by configuration a Llama and others; each of `blocks` is a unit.

    The vocabulary is padded with entries that occur in no text. They take part in the softmax, as
    in Megatron, and training drives their probabilities to zero. `part` says which layers are built
    and how they compute; what is elsewhere is None, and blocks have the names that they have in the
    whole model.
    """

    block_class: type[Block] = Block

    def __init__(self, config: ModelConfig, vocab_size: int, part: Part = WHOLE) -> None:
        super().__init__()
        layers = range(config.num_layers) if part.layers is None else part.layers
        execution, has_head = part.execution, config.untie_embeddings_and_output_weights
        self.part = replace(part, layers=layers)
        self.config = config
        self.vocab_size = vocab_size
        self.padded_vocab_size = config.padded_vocab_size(vocab_size)
        hidden = config.hidden_size
        self.tokens = self.positions = self.embed_norm = self.norm = self.head = None
        if part.is_first or (part.is_last and not has_head):
            self.tokens = VocabParallelEmbedding(self.padded_vocab_size, hidden, part.tensor)
        if part.is_first and config.position_embedding_type == "learned_absolute":
            self.positions = nn.Embedding(config.num_positions, hidden)
        if part.is_first and config.embed_layernorm:
            self.embed_norm = make_norm(config, norms=part.norms)
        again = execution.recomputed(layers)
        self.blocks = Blocks(
            {
                layer: self.block_class(config, layer, part, is_recomputed=layer in again)
                for layer in layers
            }
        )
        self.groups = execution.groups(layers)
        self.grad_is_partial = ("norm",) if part.splits_rows else ()
        if part.is_last:
            self.norm = make_norm(config, norms=part.norms)
        if part.is_last and has_head:
            self.head = ColumnParallelLinear(hidden, self.padded_vocab_size, False, part.tensor)

    def forward(
        self,
        tokens: Tensor,
        labels: Tensor | None = None,
        loss_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        edges: Tensor | None = None,
        cache: KeyValueCache | None = None,
        received: Tensor | None = None,
        *,
        routing: PassRecord | None = None,
    ) -> Tensor:
        """Return logits [B, S, V] of tokens int64 [B, S]; with labels, the mean loss, fp32 scalar.

        The loss is Σ(loss·mask)/Σmask with labels and loss_mask [B, S]; the mask is all ones if
        None. position_ids [B, S] count from 0 in each row if None. `edges` int32 [n + 1] says where
        documents begin in the concatenated rows; tokens then attend to their own document only.
        Raises ValueError for more tokens than learned positions.

        With a cache, after `cache.prepare` for these tokens, they continue the cached ones, and the
        result is logits [B, 1, V] of each row's last real token.

        A part without embedding computes with `received` [B, S, H], what the part before it
        returned; one without output layer returns what its last block does. `routing` is the record
        of what layers decide and count.
        """
        part, has_loss, share = self.part, labels is not None, None
        if cache is not None:
            position_ids = cache.positions
        if has_loss and part.context is not None:
            tokens, labels, loss_mask, position_ids, share = own_tokens(
                tokens, labels, loss_mask, position_ids, part.context, part.gathers_keys
            )
        # Logits are of whole rows.
        splits_rows = has_loss and part.splits_rows and tokens.shape[1] % part.tensor.size == 0
        x = self.embed(tokens, position_ids) if part.is_first else received  # [B, S, H]
        if splits_rows and part.is_first:
            x = self._own_rows(x)
        rotary, scale = self._positions(tokens, position_ids, cache)
        sequences = Sequences(
            rotary=rotary,
            query_scale=scale,
            edges=edges,
            cache=cache,
            is_split=share is not None,
            splits_rows=splits_rows,
            routing=routing,
        )
        for layers in self.groups:
            x = part.execution.run_group(self._run_blocks, layers, x, sequences)
        if not part.is_last:
            return x
        if not has_loss:
            return self.logits(x, cache)
        loss = self.loss(x, labels, loss_mask, splits_rows)
        return loss if share is None else loss * share

    def embed(self, tokens: Tensor, position_ids: Tensor | None) -> Tensor:
        """Return the residual stream before the first block, [B, S, H]."""
        x = self.tokens(tokens)
        if self.positions is not None:
            length = tokens.shape[1]
            if length > self.config.num_positions:
                raise ValueError(f"{length} tokens, but {self.config.num_positions} positions")
            if position_ids is None:
                x = x + self.positions.weight[:length]
            else:
                x = x + self.positions(position_ids)
        if self.config.scale_embeddings:
            # Rounded to the dtype of x before the product, as Gemma's was trained.
            x = x * x.new_full((), math.sqrt(self.config.hidden_size))
        if self.config.embedding_multiplier != 1:
            x = x * self.config.embedding_multiplier
        if self.embed_norm is not None:
            x = apply_norm(self.embed_norm, x)
        if self.config.fp32_residual_connection:
            x = x.float()
        return F.dropout(x, self.config.hidden_dropout, self.training)

    def logits(self, x: Tensor, cache: KeyValueCache | None) -> Tensor:
        """Return logits [B, S, V] of what the last block returned [B, S, H]."""
        if cache is not None:
            x = cache.last_tokens(x)
        hidden, weight = self._output_layer(x, splits_rows=False)
        logits = F.linear(hidden, weight)
        if self.part.tensor is not None:
            logits = gather_columns(logits, self.part.tensor)
        return cap_logits(logits, self.config.final_logit_softcapping)

    def loss(
        self, x: Tensor, labels: Tensor, loss_mask: Tensor | None, splits_rows: bool
    ) -> Tensor:
        """Return the loss, as `forward` does, of what the last block returned [B, S, H]."""
        hidden, weight = self._output_layer(x, splits_rows)
        mask = torch.ones(1, device=x.device) if loss_mask is None else loss_mask
        mask = mask.expand(labels.shape)
        cross_entropy = self.part.execution.cross_entropy
        if self.part.tensor is not None:
            cross_entropy = partial(parallel_cross_entropy, group=self.part.tensor)
        return head_loss(
            hidden.flatten(0, 1),
            weight,
            labels.flatten(),
            mask.flatten(),
            cross_entropy,
            self.config.final_logit_softcapping,
        )

    def _output_layer(self, x: Tensor, splits_rows: bool) -> tuple[Tensor, Tensor]:
        """Return what the output layer computes with: its input, and this rank's weights."""
        weight = self.tokens.weight if self.head is None else self.head.weight
        x = apply_norm(self.norm, x).to(weight.dtype)
        if self.config.logits_scaling != 1:  # the logits are linear in x
            x = x / self.config.logits_scaling
        if self.part.tensor is not None:
            x = enter(x, self.part.tensor, splits_rows)
        return x, local_part(weight)

    def _own_rows(self, x: Tensor) -> Tensor:
        """Return this rank's rows of x [B, S, H]; their dropout has random numbers of its own."""
        if self.training and max(self.config.hidden_dropout, self.config.attention_dropout) > 0:
            torch.manual_seed(self.part.tensor.own_seed())
        return moved(x, self.part.tensor, own_rows, gather_rows)

    def num_parameters(self, *, trained_only: bool = False) -> int:
        """Return the number of weights of the whole model, also where it is sharded."""
        weights = (each for each in self.parameters() if each.requires_grad or not trained_only)
        return sum(weight.numel() for weight in weights)

    def _positions(
        self, tokens: Tensor, position_ids: Tensor | None, cache: KeyValueCache | None
    ) -> tuple[tuple[Rotary | None, ...], Tensor | None]:
        """Return `rotary` and `query_scale` of `Sequences`."""
        if self.config.position_embedding_type != "rope":
            return (), None
        is_long = self._is_long(tokens, position_ids, cache)
        if position_ids is None:
            position_ids = torch.arange(tokens.shape[1], device=tokens.device)[None]
        tables = rotary_tables(self.config, position_ids, is_long)
        return tables, query_scale(self.config, position_ids)

    def _is_long(
        self, tokens: Tensor, position_ids: Tensor | None, cache: KeyValueCache | None
    ) -> bool | Tensor:
        """Return whether LongRoPE's factors for long texts are the ones to use."""
        first_length = self.config.longrope_original_positions
        if self.config.longrope_long_factors is None:
            return False
        if cache is not None:  # also for tokens to come, so that all keys are turned alike
            return cache.num_slots > first_length
        if position_ids is None:
            return tokens.shape[1] > first_length
        return position_ids.max() >= first_length

    def _run_blocks(self, layers: tuple[int, ...], x: Tensor, sequences: Sequences) -> Tensor:
        """Run the blocks of some layers."""
        for layer in layers:
            x = self.blocks[layer](x, sequences)
        return x


class Blocks(nn.ModuleList):
    """The blocks of some layers; index and name of each are the number of its layer."""

    def __init__(self, blocks: Mapping[int, nn.Module]) -> None:
        super().__init__()
        for layer, block in blocks.items():
            self.add_module(str(layer), block)

    def __getitem__(self, layer: int) -> nn.Module:
        return self.get_submodule(str(layer))
