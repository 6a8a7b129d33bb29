"""Small models for tests, a GPT-2 and a Llama, and tokens for them."""

from dataclasses import replace

import torch

from megatron_zpp.model.gpt import GPT
from megatron_zpp.model.init import initialize
from megatron_zpp.model.part import Part
from megatron_zpp.settings.config import ModelConfig

VOCABULARY = 50  # padded to 64

GPT2 = ModelConfig(
    num_layers=3,
    hidden_size=32,
    num_attention_heads=4,
    seq_length=16,
    make_vocab_size_divisible_by=64,
)
LLAMA = replace(
    GPT2,
    num_query_groups=2,
    normalization="RMSNorm",
    position_embedding_type="rope",
    swiglu=True,
    disable_bias_linear=True,
    untie_embeddings_and_output_weights=True,
)


def build(config: ModelConfig, seed: int = 1, **part: object) -> GPT:
    """Build a model as a run does: on the meta device, then allocated, then initialized.

    `part` are fields of its part.
    """
    config.check()
    with torch.device("meta"):
        model = GPT(config, VOCABULARY, Part(**part))
    model.to_empty(device="cpu")
    initialize(model, seed, config)
    return model


def rows(count: int = 2, length: int = 16, seed: int = 2) -> torch.Tensor:
    """Return token ids int64 [count, length + 1]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCABULARY, (count, length + 1), generator=generator)
