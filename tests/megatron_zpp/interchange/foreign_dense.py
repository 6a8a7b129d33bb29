"""Tiny models of dense families, two of each, made by their `model_type`."""

from copy import deepcopy

from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedModel,
)

from tests.megatron_zpp.interchange.foreign_mixtures import drawn

SIZES = {
    "vocab_size": 97, "hidden_size": 36, "num_hidden_layers": 2, "num_attention_heads": 6,
    "num_key_value_heads": 2, "intermediate_size": 40, "max_position_embeddings": 48,
    "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None,
}  # fmt: skip
TIED, UNTIED = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}
BIAS = {"attention_bias": True}
WINDOWS = {"num_hidden_layers": 4, "sliding_window": 7}
FALCON = {"num_kv_heads": 2, "num_key_value_heads": None, "intermediate_size": None}
NEW_FALCON = FALCON | {"new_decoder_architecture": True}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5000.0, "factor": 8.0, "low_freq_factor": 0.5,
    "high_freq_factor": 6.0, "original_max_position_embeddings": 40,
}  # fmt: skip
SCALED_QUERIES = {
    "rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 12, "llama_4_scaling_beta": 0.3, "beta_fast": 3.0,
}  # fmt: skip
MULTIPLIERS = {
    "embedding_multiplier": 6.0, "residual_multiplier": 0.22, "attention_multiplier": 0.3,
    "logits_scaling": 1.5,
}  # fmt: skip
DENSE = {
    "seed_oss": {"head_dim": 10},
    "seed_oss, other biases": {
        "head_dim": 8, "attention_bias": False, "attention_out_bias": True, "mlp_bias": True,
    } | TIED,
    "ministral": {"sliding_window": 7, "head_dim": 6},
    "ministral, kinds of layers": {
        "layer_types": ["full_attention", "sliding_attention"], "sliding_window": 6, "head_dim": 10,
    },
    "ministral3": {"head_dim": 10, "rope_parameters": SCALED_QUERIES},
    "ministral3, a window, tied": {
        "head_dim": 8, "sliding_window": 9, "hidden_act": "gelu",
        "rope_parameters": SCALED_QUERIES | {"mscale_all_dim": 0.5, "truncate": False},
    } | TIED,
    "internlm3": {"head_dim": 10},
    "internlm3, biases, dynamic": {
        "head_dim": 8, "attention_bias": True, "mlp_bias": True,
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 6.0},
    },
    "granite": MULTIPLIERS,
    "granite, biases, tied": MULTIPLIERS | {"mlp_bias": True} | BIAS | TIED,
    "glm": {"head_dim": 8},
    "glm, no bias, a quarter": {
        "head_dim": 8, "attention_bias": False,
        "rope_parameters": {"partial_rotary_factor": 0.25, "rope_theta": 100.0},
    },
    "glm4": {"head_dim": 8},
    "glm4, no bias, all channels, tied": {
        "head_dim": 10, "attention_bias": False,
        "rope_parameters": {"partial_rotary_factor": 1.0, "rope_theta": 100.0},
    } | TIED,
    "cohere": {"logit_scale": 0.8},
    "cohere, norms of heads, untied": {"use_qk_norm": True, "logit_scale": 0.7} | BIAS | UNTIED,
    "cohere2": WINDOWS | {"logit_scale": 0.8},
    "cohere2, kinds of layers, untied": {
        "layer_types": ["full_attention", "sliding_attention"], "sliding_window": 6,
        "logit_scale": 1.3, "hidden_act": "gelu_pytorch_tanh",
    } | BIAS | UNTIED,
    "starcoder2": {},
    "starcoder2, a window, no bias": {
        "sliding_window": 7, "use_bias": False, "hidden_act": "relu", "norm_epsilon": 1e-3,
    } | UNTIED,
    "exaone4": WINDOWS,
    "exaone4, no windows, tied": {
        "sliding_window": None, "layer_types": ["full_attention"] * 2, "rope_parameters": LLAMA3,
    } | TIED,
    "olmo": {},
    "olmo, biases, tied": {"num_key_value_heads": 6} | BIAS | TIED,
    "gemma": {"head_dim": 10},
    "gemma, a bias, exact GELU, untied": {"head_dim": 6, "hidden_act": "gelu_python"}
    | BIAS | UNTIED,
    "nemotron": {"head_dim": 8},
    "nemotron, biases, a quarter": {
        "head_dim": 8, "mlp_bias": True, "hidden_act": "gelu",
        "rope_parameters": {"partial_rotary_factor": 0.25, "rope_theta": 100.0},
    } | BIAS,
    "falcon": FALCON,
    "falcon, in a row, biases, untied": FALCON | {
        "parallel_attn": False, "bias": True, "ffn_hidden_size": 40,
    } | UNTIED,
    "falcon, all heads": FALCON | {"multi_query": False, "num_kv_heads": 6},
    "falcon 40b": NEW_FALCON,
    "falcon 2, biases": NEW_FALCON | {"num_ln_in_parallel_attn": 1, "bias": True},
    "stablelm": {"rope_parameters": {"partial_rotary_factor": 0.7, "rope_theta": 10000.0}},
    "stablelm, norms of heads, parallel": {
        "qk_layernorm": True, "use_parallel_residual": True, "use_qkv_bias": True,
        "rope_parameters": {"partial_rotary_factor": 0.4, "rope_theta": 100.0},
    } | TIED,
    "ernie4_5": {"head_dim": 10},
    "ernie4_5, biases, untied": {"head_dim": 8, "use_bias": True} | UNTIED,
    "hunyuan_v1_dense": {"head_dim": 10},
    "hunyuan_v1_dense, alpha, biases, tied": {
        "head_dim": 8,
        "rope_parameters": {"rope_type": "dynamic", "alpha": 50.0, "rope_theta": 100.0,
                            "factor": 1.0},
    } | BIAS | TIED,
    "apertus": {},
    "apertus, another activation, biases, tied": {
        "hidden_act": "relu2", "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
    } | BIAS | TIED,
    "helium": {"head_dim": 6},
    "helium, biases, tied": {"head_dim": 6, "mlp_bias": True, "num_key_value_heads": 1}
    | BIAS | TIED,
    "nanochat": {},
    "nanochat, biases, no cap, tied": {
        "final_logit_softcapping": None, "hidden_act": "gelu", "num_key_value_heads": 6,
    } | BIAS | TIED,
}  # fmt: skip


def dense(name: str) -> PreTrainedModel:
    """Return a model of `DENSE`, drawn; its name begins with its model_type."""
    model_type = name.replace(",", " ").split()[0]
    config = AutoConfig.for_model(model_type, **deepcopy(SIZES | DENSE[name]))
    return drawn(AutoModelForCausalLM.from_config(config))


def with_images(model_type: str) -> PreTrainedModel:
    """Return a model of texts and images whose language model is a Gemma 3 or a Ministral 3."""
    text = SIZES | {"head_dim": 10, "model_type": "gemma3_text", "sliding_window": 7}
    if model_type == "mistral3":
        text |= {"model_type": "ministral3", "rope_parameters": dict(SCALED_QUERIES)}
        text |= {"sliding_window": None}
    vision = {
        "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
        "num_attention_heads": 2, "head_dim": 8, "image_size": 28, "patch_size": 14,
    }  # fmt: skip
    config = AutoConfig.for_model(
        model_type, text_config=text, vision_config=vision, mm_tokens_per_image=4,
        image_token_index=96,
    )  # fmt: skip
    return drawn(AutoModelForImageTextToText.from_config(config))
