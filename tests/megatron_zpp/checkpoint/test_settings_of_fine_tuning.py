"""Which settings of a model `--finetune` may change: those that no weight depends on."""

from dataclasses import replace

import pytest
import torch

from megatron_zpp.checkpoint.training_state import OF_FINE_TUNING
from megatron_zpp.model.gpt import GPT
from megatron_zpp.settings.config import ModelConfig
from tests.megatron_zpp.model.small import LLAMA, VOCABULARY

CHANGED = {  # with what goes with it
    "rotary_percent": 0.5,
    "rotary_base": 5e5,
    "use_rope_scaling": True,
    "rope_scaling_factor": 32.0,
    "rope_scaling_low_freq_factor": 2.0,
    "rope_scaling_high_freq_factor": 8.0,
    "rope_scaling_original_positions": 16,
    "rotary_seq_len_interpolation_factor": 4.0,
    "rotary_base_local": 1e3,
    "no_rope_freq": "[0,0,1]",
    "rope_type": "yarn",
    "rotary_scaling_factor": 4.0,
    "yarn_original_max_position_embeddings": 16,
    "yarn_beta_fast": 16.0,
    "yarn_beta_slow": 2.0,
    "yarn_attention_factor": 1.1,
    "mscale": 0.7,
    "mscale_all_dim": 0.7,
    "yarn_correction_range_round_to_int": False,
    "llama_4_scaling_beta": 0.1,
    "longrope_short_factors": (1.0,) * 4,
    "longrope_long_factors": (2.0,) * 4,
    "longrope_original_positions": 16,
    "longrope_attention_factor": 1.1,
    "window_size": "4,0",
    "window_attn_skip_freq": "[1,0,1]",
    "layernorm_epsilon": 1e-6,
    "query_pre_attn_scalar": 5.0,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "activation_func_clamp_value": 7.0,
    "softmax_type": "off-by-one",
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.2,
    "logits_scaling": 8.0,
    "scale_embeddings": True,
    "bias_gelu_fusion": False,
    "moe_router_topk": 1,
    "moe_router_topk_scaling_factor": 2.5,
    "moe_router_num_groups": 2,
    "moe_router_group_topk": 1,
    "moe_router_group_best": 1,
}
MODEL = replace(LLAMA, num_experts=4, moe_router_pre_softmax=True)


def weights(config: ModelConfig) -> dict[str, torch.Size]:
    with torch.device("meta"):
        model = GPT(config, VOCABULARY)
    return {name: each.shape for name, each in model.state_dict().items()}


def test_the_list_of_settings_is_complete():
    assert CHANGED.keys() == OF_FINE_TUNING


@pytest.mark.parametrize("name", CHANGED)
def test_no_weight_depends_on_it(name):
    changed = replace(MODEL, **{name: CHANGED[name]})
    assert changed != MODEL and weights(changed) == weights(MODEL)
