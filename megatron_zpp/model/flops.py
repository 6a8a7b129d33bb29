"""Floating-point operations a GPT spends on one token, for the throughput in the log.

Only matrix products count, two operations per multiply-add, a backward pass twice its forward
(Narayanan et al. 2021, arXiv 2104.04473, section 5.1, equation 3). Attention counts all S keys per
query, as Megatron does, though a causal kernel may skip half. What is recomputed counts again among
the operations performed, and not among those of the model, which MFU counts (Chowdhery et al. 2022,
arXiv 2204.02311, appendix B).
"""

from dataclasses import dataclass

from megatron_zpp.settings.config import ModelConfig, RecomputeConfig

BACKWARD = 2  # forward passes' worth of operations in a backward pass


@dataclass(frozen=True, kw_only=True)
class TokenFlops:
    """Operations for one token: those of the model, and those performed, recomputation included."""

    model: float
    performed: float

    @classmethod
    def of(
        cls, model: ModelConfig, recompute: RecomputeConfig, vocab_size: int
    ) -> "TokenFlops":
        return cls(
            model=flops_per_token(model, RecomputeConfig(), vocab_size),
            performed=flops_per_token(model, recompute, vocab_size),
        )


def flops_per_token(model: ModelConfig, recompute: RecomputeConfig, vocab_size: int) -> float:
    """Operations of one training step per token, forward, backward and recomputation.

    `vocab_size` is the tokenizer's; the padded size is what the output layer multiplies by.
    Equals Megatron's 96·s·L·h²·(1 + s/6h + V/16Lh) per sample for its GPT with full recomputation.
    """
    core = _attention_core(model)
    layer = _projections(model) + core
    head = 2 * model.hidden_size * model.padded_vocab_size(vocab_size)
    step = (1 + BACKWARD) * (model.num_layers * layer + head)
    if recompute.recompute_granularity == "full":
        return step + _recomputed_layers(model, recompute) * layer
    if recompute.recompute_granularity == "selective":
        return step + model.num_layers * core
    return step


def _projections(model: ModelConfig) -> float:
    heads = 2 * model.num_attention_heads + 2 * model.kv_heads  # query, output, keys, values
    attention = 2 * model.hidden_size * model.head_dim * heads
    matrices = 3 if model.swiglu else 2
    return attention + 2 * matrices * model.hidden_size * model.ffn_size


def _attention_core(model: ModelConfig) -> float:
    return 2 * 2 * model.seq_length * model.num_attention_heads * model.head_dim


def _recomputed_layers(model: ModelConfig, recompute: RecomputeConfig) -> int:
    if recompute.recompute_method == "block":
        return min(recompute.recompute_num_layers or 0, model.num_layers)
    return model.num_layers
