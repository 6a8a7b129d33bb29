"""The transformer block: a branch of attention, and one of an MLP or what takes its place.

Both are added to the residual stream. x has a rank's rows where rows are split. Shapes: B batch,
S sequence, H hidden.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_zpp.model.attention.attention import Attention
from megatron_zpp.model.attention.latent_attention import LatentAttention
from megatron_zpp.model.attention.sequences import WHOLE_ROWS, Sequences
from megatron_zpp.model.mlp import feed_forward
from megatron_zpp.model.normalization import apply_norm, make_norm
from megatron_zpp.model.part import WHOLE, Part
from megatron_zpp.settings.config import ModelConfig

NORMS = ("norm1", "post_norm1", "norm2", "post_norm2")


class Block(nn.Module):
    """Transformer block: a branch of attention, then one of the MLP, each added to the stream x.

    By default each is normalized before (pre-LN): x + attention(norm1(x)), then x + mlp(norm2(x));
    by `norm_placement` behind, before it is added, or on both sides. Parallel, both start from the
    same x, perhaps normalized once for both. The execution of the model's part runs `compute`
    inside the block's hooks. With an fp32 residual stream x must be fp32 whatever the dtype of the
    weights.
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
