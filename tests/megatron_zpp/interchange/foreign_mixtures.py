"""Tiny mixtures of experts of transformers, for several test files."""

import torch
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    GraniteMoeConfig,
    GraniteMoeForCausalLM,
    MiniMaxM2Config,
    MiniMaxM2ForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    PreTrainedModel,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

SIZES = {
    "vocab_size": 97, "hidden_size": 36, "num_hidden_layers": 2, "num_attention_heads": 6,
    "num_key_value_heads": 2, "intermediate_size": 40, "max_position_embeddings": 48,
    "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None, "num_experts_per_tok": 2,
}  # fmt: skip
QWEN = {"num_experts": 4, "moe_intermediate_size": 24}
DEEPSEEK = {
    "num_key_value_heads": 6, "n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 4,
    "topk_group": 2, "routed_scaling_factor": 2.0, "first_k_dense_replace": 1,
    "moe_intermediate_size": 24, "n_shared_experts": 2, "kv_lora_rank": 8, "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4, "v_head_dim": 6, "q_lora_rank": 12,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "mscale": 0.7, "mscale_all_dim": 0.9,
    "original_max_position_embeddings": 12,
}  # fmt: skip


def mixtral(**changes: object) -> PreTrainedModel:
    """Return a Mixtral: the weights of the chosen experts sum to 1."""
    return drawn(MixtralForCausalLM(MixtralConfig(**SIZES | {"num_local_experts": 4} | changes)))


def qwen2_moe(**changes: object) -> PreTrainedModel:
    """Return a Qwen2-MoE: a gated MLP beside the experts, whose weights are not normalized."""
    more = QWEN | {"shared_expert_intermediate_size": 20}
    return drawn(Qwen2MoeForCausalLM(Qwen2MoeConfig(**SIZES | more | changes)))


def qwen3_moe(**changes: object) -> PreTrainedModel:
    """Return a Qwen3-MoE as the released ones are: normalized weights, wide heads."""
    more = QWEN | {"norm_topk_prob": True, "head_dim": 10}
    return drawn(Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES | more | changes)))


def olmoe(**changes: object) -> PreTrainedModel:
    """Return an OLMoE: all heads of queries, and of keys, are normalized at once."""
    return drawn(OlmoeForCausalLM(OlmoeConfig(**SIZES | {"num_experts": 4} | changes)))


def granite_moe(**changes: object) -> PreTrainedModel:
    """Return a Granite-MoE: four multipliers, and one tensor for the gates and inputs of all."""
    more = {
        "num_local_experts": 4, "embedding_multiplier": 6.0, "residual_multiplier": 0.22,
        "attention_multiplier": 0.3, "logits_scaling": 1.5,
    }  # fmt: skip
    return drawn(GraniteMoeForCausalLM(GraniteMoeConfig(**SIZES | more | changes)))


def deepseek_v2(**changes: object) -> PreTrainedModel:
    """Return a DeepSeek-V2 that chooses two of four groups of experts by their best one."""
    more = DEEPSEEK | {"topk_method": "group_limited_greedy"}
    return drawn(DeepseekV2ForCausalLM(DeepseekV2Config(**SIZES | more | changes)))


def deepseek_v3(**changes: object) -> PreTrainedModel:
    """Return a DeepSeek-V3 that chooses two of four groups of experts by their best two."""
    more = DEEPSEEK | {"num_mtp_layers": 0}
    return drawn(DeepseekV3ForCausalLM(DeepseekV3Config(**SIZES | more | changes)))


def glm4_moe(**changes: object) -> PreTrainedModel:
    """Return a GLM-4.5: one dense layer, half of the channels rotated, a shared expert."""
    more = {
        "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24,
        "routed_scaling_factor": 2.5, "use_qk_norm": True, "attention_bias": True, "head_dim": 12,
        "num_mtp_layers": 0,
    }  # fmt: skip
    return drawn(Glm4MoeForCausalLM(Glm4MoeConfig(**SIZES | more | changes)))


def minimax_m2(**changes: object) -> PreTrainedModel:
    """Return a MiniMax-M2: sigmoid scores with a bias, norms over all heads, a part rotated."""
    more = {"num_local_experts": 4, "head_dim": 8, "rotary_dim": 4}
    return drawn(MiniMaxM2ForCausalLM(MiniMaxM2Config(**SIZES | more | changes)))


def gpt_oss(**changes: object) -> PreTrainedModel:
    """Return a gpt-oss: sinks, biases everywhere, a window in its first layer, a clamped SwiGLU."""
    more = {"num_local_experts": 4, "head_dim": 8, "sliding_window": 7, "swiglu_limit": 0.7}
    return drawn(GptOssForCausalLM(GptOssConfig(**SIZES | more | changes)))


MIXTURES = {
    "mixtral": mixtral,
    "mixtral, a window, tied": lambda: mixtral(sliding_window=7, tie_word_embeddings=True),
    "qwen2_moe": qwen2_moe,
    "qwen2_moe, every second layer, no bias, normalized": lambda: qwen2_moe(
        decoder_sparse_step=2, num_hidden_layers=4, qkv_bias=False, norm_topk_prob=True
    ),
    "qwen3_moe": qwen3_moe,
    "qwen3_moe, a dense layer, a bias, not normalized": lambda: qwen3_moe(
        mlp_only_layers=[0], attention_bias=True, norm_topk_prob=False
    ),
    "olmoe": olmoe,
    "olmoe, normalized, all heads": lambda: olmoe(norm_topk_prob=True, num_key_value_heads=6),
    "granitemoe": granite_moe,
    "granitemoe, tied, a bias": lambda: granite_moe(tie_word_embeddings=True, attention_bias=True),
    "deepseek_v2": deepseek_v2,
    "deepseek_v2-lite": lambda: deepseek_v2(
        q_lora_rank=None, topk_method="greedy", n_group=1, topk_group=1, rope_parameters=dict(YARN),
        routed_scaling_factor=1.0,
    ),
    "deepseek_v3": deepseek_v3,
    "deepseek_v3, yarn, a bias": lambda: deepseek_v3(
        rope_parameters=dict(YARN), attention_bias=True
    ),
    "deepseek_v3, yarn with one mscale": lambda: deepseek_v3(
        rope_parameters={key: value for key, value in YARN.items() if key != "mscale"}
    ),
    "moonlight": lambda: deepseek_v3(
        q_lora_rank=None, n_group=1, topk_group=1, routed_scaling_factor=2.446, rms_norm_eps=1e-5
    ),
    "glm4_moe": glm4_moe,
    "glm4_moe, groups, no norms, no biases": lambda: glm4_moe(
        n_group=4, topk_group=2, use_qk_norm=False, attention_bias=False, n_shared_experts=2,
        rope_parameters={"partial_rotary_factor": 0.25, "rope_theta": 500.0}, head_dim=16,
    ),
    "minimax_m2": minimax_m2,
    "minimax_m2, yarn, all heads, tied": lambda: minimax_m2(
        rope_parameters=YARN | {"partial_rotary_factor": 0.75}, num_key_value_heads=6,
        tie_word_embeddings=True,
    ),
    "gpt_oss": gpt_oss,
    "gpt_oss, no bias in attention, windows of its own, not scaled": lambda: gpt_oss(
        attention_bias=False, layer_types=["full_attention", "sliding_attention"],
        rope_parameters={"rope_type": "default", "rope_theta": 500.0}, num_key_value_heads=6,
        swiglu_limit=7.0,
    ),
}  # fmt: skip


def drawn(model: PreTrainedModel) -> PreTrainedModel:
    """Draw every tensor of the model so that logits are of order one; return it in eval mode."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            mean, std = (1.0, 0.1) if "norm" in name or "ln_" in name else (0.0, 0.2)
            parameter.normal_(mean, std, generator=generator)
        for name, buffer in model.named_buffers():
            if name.endswith("bias"):  # of the choice of experts
                buffer.normal_(0.0, 0.1, generator=generator)
    return model.eval()
