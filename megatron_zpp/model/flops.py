"""Floating-point operations of a GPT for one token, from which the log computes the throughput.

Only matrix products count, with two operations per multiply-add and a backward pass as two forward
passes (Narayanan et al. 2021, arXiv 2104.04473, section 5.1, equation 3). Attention counts all S
keys for every query, as Megatron does, though a causal kernel may skip half of them; with a window
it counts those of the window. Recomputation counts among the operations performed, but not among
those of the model, which are the ones that MFU counts (Chowdhery et al. 2022, arXiv 2204.02311,
appendix B).
"""

from dataclasses import dataclass
from itertools import chain

from megatron_zpp.model.mlp import feed_forward
from megatron_zpp.model.part import Execution
from megatron_zpp.settings.config import ModelConfig, RecomputeConfig

BACKWARD = 2  # operations of a backward pass, in forward passes


@dataclass(frozen=True, kw_only=True)
class TokenFlops:
    """Operations for one token: of the model, and performed, which includes recomputation."""

    model: float
    performed: float

    @classmethod
    def of(cls, model: ModelConfig, recompute: RecomputeConfig, vocab_size: int) -> "TokenFlops":
        return cls(
            model=flops_per_token(model, RecomputeConfig(), vocab_size),
            performed=flops_per_token(model, recompute, vocab_size),
        )


def flops_per_token(model: ModelConfig, recompute: RecomputeConfig, vocab_size: int) -> float:
    """Return the operations of one training step per token: forward, backward, recomputation.

    `vocab_size` is the tokenizer's; the output layer computes the padded vocabulary. For Megatron's
    GPT with full recomputation this is its formula 96·s·L·h²·(1 + s/6h + V/16Lh) per sample.
    """
    core_attentions = [core_attention(model, window) for window in model.windows]
    layers = [projections(model, layer) + each for layer, each in enumerate(core_attentions)]
    head = 2 * model.hidden_size * model.padded_vocab_size(vocab_size)
    step = (1 + BACKWARD) * (sum(layers) + head)
    if recompute.recompute_granularity == "full":
        again = Execution(recompute).checkpoints(range(model.num_layers))
        return step + sum(layers[layer] for layer in chain(*again))
    if recompute.recompute_granularity == "selective":
        return step + sum(core_attentions)
    return step


def projections(model: ModelConfig, layer: int) -> float:
    """Return the operations of a layer's linear parts for one token, forward."""
    mlp = feed_forward(model, layer).flops(model)
    if model.multi_latent_attention:
        return latent_projections(model) + mlp
    num_heads = 2 * model.num_attention_heads + 2 * model.kv_heads  # query, output, keys, values
    return 2 * model.hidden_size * model.head_dim * num_heads + mlp


def latent_projections(model: ModelConfig) -> float:
    """Return the operations of the linear layers of latent attention for one token, forward."""
    heads, hidden = model.num_attention_heads, model.hidden_size
    q_width, rank, latent = heads * model.head_dim, model.q_lora_rank, model.kv_lora_rank
    queries = hidden * q_width if rank is None else rank * (hidden + q_width)
    down = hidden * (latent + model.qk_pos_emb_head_dim)
    up = latent * heads * (model.qk_head_dim + model.v_head_dim)
    return 2 * (queries + down + up + hidden * heads * model.v_head_dim)


def core_attention(model: ModelConfig, window: int | None) -> float:
    """Return the operations of a layer's scores and their sums for one token, forward."""
    num_keys = min(model.seq_length, window or model.seq_length)
    channels = 2 * model.head_dim  # of a key and a value
    if model.multi_latent_attention:
        channels = model.head_dim + model.v_head_dim
    return 2 * num_keys * model.num_attention_heads * channels
