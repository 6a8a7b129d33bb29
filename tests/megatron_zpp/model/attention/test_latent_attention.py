"""Latent attention is that of transformers' DeepSeek models, and the cache of latents gives its
numbers again.

Tolerances: fp32 rounding, 6e-8, in a few dozen operations on numbers of order one.
"""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from transformers import DeepseekV2Config, DeepseekV3Config
from transformers.models.deepseek_v2 import modeling_deepseek_v2 as v2
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as v3

from megatron_zpp.capabilities.lora.adapters import add_adapters
from megatron_zpp.capabilities.lora.settings import LoraConfig
from megatron_zpp.checkpoint.training_state import LATENT_ATTENTION, architecture
from megatron_zpp.model.attention.cache import KeyValueCache
from megatron_zpp.model.attention.latent_attention import LatentAttention
from megatron_zpp.model.attention.rotary import rotary_tables
from megatron_zpp.model.attention.scores import Scores
from megatron_zpp.model.attention.sequences import Sequences
from megatron_zpp.model.flops import core_attention, latent_projections
from megatron_zpp.settings.arguments import parse
from megatron_zpp.settings.config import ModelConfig
from tests.megatron_zpp.model.small import LLAMA, build, rows

SIZES = {
    "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "kv_lora_rank": 8,
    "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6, "max_position_embeddings": 64,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "mscale": 0.6, "mscale_all_dim": 0.9,
    "original_max_position_embeddings": 16,
}  # fmt: skip
LATENT = replace(
    LLAMA, num_query_groups=None, multi_latent_attention=True, kv_lora_rank=8, qk_head_dim=8,
    qk_pos_emb_head_dim=4, v_head_dim=6, qk_layernorm=True,
)  # fmt: skip
OURS = {
    "q_proj": "q", "q_a_proj": "q_down", "q_a_layernorm": "q_down_norm", "q_b_proj": "q_up",
    "kv_a_proj_with_mqa": "kv_down", "kv_a_layernorm": "kv_down_norm", "kv_b_proj": "kv_up",
    "o_proj": "output",
}  # fmt: skip
VERSIONS = {
    "V2": (v2.DeepseekV2Attention, v2.DeepseekV2RotaryEmbedding, DeepseekV2Config),
    "V3": (v3.DeepseekV3Attention, v3.DeepseekV3RotaryEmbedding, DeepseekV3Config),
}


def randomized(module: nn.Module, seed: int = 4) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.3, generator=generator)
    return module


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("rope", [{"rope_type": "default", "rope_theta": 100.0}, YARN])
@pytest.mark.parametrize("rank", [None, 12])
@pytest.mark.parametrize("version", VERSIONS)
def test_a_layer_is_that_of_transformers(version: str, rank: int | None, rope: dict) -> None:
    attention, rotary, config_class = VERSIONS[version]
    config = config_class(
        **SIZES, q_lora_rank=rank, rope_parameters=dict(rope), attention_bias=True,
        attn_implementation="sdpa",
    )  # fmt: skip
    theirs = randomized(attention(config, 0)).eval()
    scaling = {
        "rope_type": "yarn", "rotary_scaling_factor": 4.0, "mscale": 0.6, "mscale_all_dim": 0.9,
        "yarn_original_max_position_embeddings": 16,
    }  # fmt: skip
    fields = {} if rope["rope_type"] == "default" else scaling
    model = replace(
        LATENT, q_lora_rank=rank, seq_length=64, rotary_base=100.0, add_qkv_bias=True,
        add_attention_output_bias=True, **fields,
    )  # fmt: skip
    ours = LatentAttention(model).eval()
    ours.load_state_dict(
        {f"{OURS[name.split('.')[0]]}.{name.split('.')[1]}": value
         for name, value in theirs.state_dict().items()}
    )  # fmt: skip
    x, positions = numbers(2, 40, 32), torch.arange(40)[None]
    with torch.no_grad():
        embedding = rotary(config)(x, positions)
        expected = theirs(x, position_embeddings=embedding, attention_mask=None)[0]
        output = ours(x, Sequences(rotary=rotary_tables(model, positions)))
    assert expected.std() > 0.1
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-5)


def test_without_norms_of_latents() -> None:
    """Megatron has them with --qk-layernorm only."""
    names = dict(
        LatentAttention(replace(LATENT, qk_layernorm=False, q_lora_rank=12)).named_children()
    )
    assert names.keys() == {"q_down", "q_up", "kv_down", "kv_up", "output"}


def test_documents_are_apart() -> None:
    """The second document of a row gives what it gives as a row."""
    model, tokens = build(replace(LATENT, init_method_std=0.3)).eval(), rows(1)
    positions = torch.cat((torch.arange(6), torch.arange(11)))[None]
    edges = torch.tensor([0, 6, 17], dtype=torch.int32)
    with torch.no_grad():
        both = model(tokens, position_ids=positions, edges=edges)
        alone = model(tokens[:, 6:])
    torch.testing.assert_close(both[:, 6:], alone, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"window_size": "4,0"},
        {"attn_logit_softcapping": 2.0},
        {"softmax_type": "learnable"},
        {"softmax_type": "off-by-one"},
    ],
)
@pytest.mark.parametrize("lora", [None, LoraConfig(lora_rank=2)])
def test_generation_with_latents_in_the_cache(lora: LoraConfig | None, changes: dict) -> None:
    """Rows of two lengths, one token and then three at a time; only latents are kept."""
    config = replace(LATENT, q_lora_rank=12, init_method_std=0.3, **changes)
    model, tokens = build(config).eval(), rows()
    if lora is not None:
        randomized(add_adapters(model, lora))
    cache, lengths = KeyValueCache(config.num_layers, 2, 17), [7, 5]
    with torch.no_grad():
        model(tokens[:, :7], cache=cache.prepare(lengths, tokens.device))
        for count in (1, 3, 1):
            new = torch.stack([row[n : n + count] for row, n in zip(tokens, lengths, strict=True)])
            logits = model(new, cache=cache.prepare([count] * 2, tokens.device))
            lengths = [length + count for length in lengths]
            for row, length in enumerate(lengths):
                expected = model(tokens[row : row + 1, :length])[0, -1]
                atol = 2e-5 * float(expected.abs().max())
                torch.testing.assert_close(logits[row, 0], expected, rtol=0, atol=atol)
    assert cache.layers[0]._memory.shape == (1, 2, 1, 17, 8 + 4)


def test_operations() -> None:
    """Two for each weight of a layer, and two for each channel of each key and value."""
    for rank in (None, 12):
        config = replace(LATENT, q_lora_rank=rank)
        layer = LatentAttention(replace(config, qk_layernorm=False))
        weights = sum(parameter.numel() for parameter in layer.parameters())
        assert latent_projections(config) == 2 * weights
        assert core_attention(config, None) == 2 * 16 * 4 * (8 + 4 + 6)


LATENT_FLAGS = "--mock-data --multi-latent-attention "


def test_flags_mean_what_megatron_means() -> None:
    """This attention has YaRN by default, which changes nothing without a factor."""
    model = parse(LATENT_FLAGS.split(), 1).model
    assert (model.kv_lora_rank, model.qk_head_dim, model.qk_pos_emb_head_dim) == (32, 128, 64)
    assert (model.q_lora_rank, model.v_head_dim, model.rope_type) == (None, 128, "rope")
    model = parse(f"{LATENT_FLAGS} --rotary-scaling-factor 40 --mscale-all-dim 1".split(), 1).model
    assert model.rope_type == "yarn" and model.turned_scale == 1.0
    scale = Scores.of(model, 0).scale
    assert scale == pytest.approx(192**-0.5 * (1 + 0.1 * math.log(40)) ** 2)


def test_the_architecture_of_other_models_is_as_before() -> None:
    """Checkpoints from before these settings load."""
    dense, latent = architecture(ModelConfig(), 7), architecture(LATENT, 7)
    assert set(LATENT_ATTENTION) <= latent.keys() and not set(LATENT_ATTENTION) & dense.keys()
