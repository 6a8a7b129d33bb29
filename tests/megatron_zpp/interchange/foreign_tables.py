"""Settings of tiny models of transformers: those of a type, and variants of these."""

ROPE, PAD = "rope_parameters", {"pad_token_id": None}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5000.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
}  # fmt: skip
LLAMA3_LOW = LLAMA3 | {
    "low_freq_factor": 0.5, "high_freq_factor": 6.0, "original_max_position_embeddings": 40,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0,
    "original_max_position_embeddings": 40,
}  # fmt: skip
YARN_MSCALES = YARN | {
    "mscale": 0.7, "mscale_all_dim": 0.9, "original_max_position_embeddings": 12,
}  # fmt: skip
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 500.0, "short_factor": [1.0, 1.1, 1.25],
    "long_factor": [1.5, 3.0, 7.0],
}  # fmt: skip
ALTERNATING = ["sliding_attention", "full_attention"]
BASES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    "full_attention": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 8.0},
}
SCALED_QUERIES = {
    "rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 12, "llama_4_scaling_beta": 0.3, "beta_fast": 3.0,
}  # fmt: skip
MULTIPLIERS = {
    "embedding_multiplier": 6.0, "residual_multiplier": 0.22, "attention_multiplier": 0.3,
    "logits_scaling": 1.5,
}  # fmt: skip
SIZES = {
    "vocab_size": 97, "hidden_size": 36, "num_hidden_layers": 2, "num_attention_heads": 6,
    "num_key_value_heads": 2, "intermediate_size": 40, "max_position_embeddings": 48,
    "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None,
}  # fmt: skip
LLAMA = {key: size for key, size in SIZES.items() if key not in PAD} | {
    "vocab_size": 101, "tie_word_embeddings": False,
}  # fmt: skip
GEMMA = LLAMA | PAD | {
    "head_dim": 10, "query_pre_attn_scalar": 12, "sliding_window": 7, "tie_word_embeddings": True,
}  # fmt: skip
TWO_OF = SIZES | {"num_experts_per_tok": 2}
QWEN_MOE = TWO_OF | {"num_experts": 4, "moe_intermediate_size": 24}
TIED, UNTIED = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}
BIAS = {"attention_bias": True}
WINDOWS = {"num_hidden_layers": 4, "sliding_window": 7}
FALCON = {"num_kv_heads": 2, "num_key_value_heads": None, "intermediate_size": None}
NEW_FALCON = FALCON | {"new_decoder_architecture": True}
MULTIPLIERS = {
    "embedding_multiplier": 6.0, "residual_multiplier": 0.22, "attention_multiplier": 0.3,
    "logits_scaling": 1.5,
}  # fmt: skip
DEEPSEEK = SIZES | {
    "num_key_value_heads": 6, "n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 4,
    "topk_group": 2, "routed_scaling_factor": 2.0, "first_k_dense_replace": 1,
    "moe_intermediate_size": 24, "n_shared_experts": 2, "kv_lora_rank": 8, "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4, "v_head_dim": 6, "q_lora_rank": 12,
}  # fmt: skip
# By `model_type`; others have SIZES.
TYPES = {
    "gpt2": {
        "vocab_size": 97, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 48,
        "n_inner": 80, "bos_token_id": 0, "eos_token_id": 0,
    },
    "llama": LLAMA,
    "mistral": LLAMA | {"sliding_window": 7},
    "qwen2": LLAMA,
    "qwen3": LLAMA | {"head_dim": 10},
    "phi3": LLAMA | PAD,
    "olmo2": LLAMA | PAD,
    "olmo3": LLAMA | PAD | WINDOWS,
    "smollm3": LLAMA | PAD | {"num_hidden_layers": 4, "no_rope_layer_interval": 2},
    "gemma2": GEMMA | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    "gemma3_text": GEMMA | {
        "num_hidden_layers": 4, "layer_types": ALTERNATING * 2, ROPE: BASES,
    },
    "bloom": {
        "vocab_size": 97, "hidden_size": 36, "n_layer": 2, "n_head": 6, "seq_length": 48,
        "bos_token_id": 0, "eos_token_id": 0,
    },
    "gpt_neox": {
        "vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "intermediate_size": 80, "max_position_embeddings": 48, "use_parallel_residual": False,
        ROPE: {"partial_rotary_factor": 1.0, "rope_theta": 500.0}, "eos_token_id": 0,
    },
    "mixtral": TWO_OF | {"num_local_experts": 4},
    "qwen2_moe": QWEN_MOE | {"shared_expert_intermediate_size": 20},
    "qwen3_moe": QWEN_MOE | {"norm_topk_prob": True, "head_dim": 10},
    "olmoe": TWO_OF | {"num_experts": 4},
    "granitemoe": TWO_OF | MULTIPLIERS | {"num_local_experts": 4},
    "deepseek_v2": DEEPSEEK | {"topk_method": "group_limited_greedy"},
    "deepseek_v3": DEEPSEEK | {"num_mtp_layers": 0},
    "glm4_moe": SIZES | {
        "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24,
        "routed_scaling_factor": 2.5, "use_qk_norm": True, "attention_bias": True, "head_dim": 12,
        "num_mtp_layers": 0,
    },
    "minimax_m2": TWO_OF | {"num_local_experts": 4, "head_dim": 8, "rotary_dim": 4},
    "gpt_oss": TWO_OF | {
        "num_local_experts": 4, "head_dim": 8, "sliding_window": 7, "swiglu_limit": 0.7,
    },
}  # fmt: skip
# Names begin with a type, or with one of the other names that are in `foreign_models.py`.
MODELS = {
    "gpt2": {},
    "gpt2, untied, exact GELU": {"activation_function": "gelu", "n_inner": None} | UNTIED,
    "gpt2, ReLU, scores not divided": {
        "activation_function": "relu", "scale_attn_weights": False,
    },
    "gpt2, fast GELU": {"activation_function": "gelu_fast"},
    "llama": {},
    "llama, bias in attention, GeGLU, linear scaling by 2.5": {
        "hidden_act": "gelu", ROPE: {"rope_type": "linear", "rope_theta": 500.5, "factor": 2.5},
    } | BIAS,
    "llama, long factors": {
        ROPE: LONGROPE | {"original_max_position_embeddings": 16, "factor": 2.0},
    },
    "llama, bias in the MLP, gated ReLU, other bounds of Llama 3.1's scaling": {
        "mlp_bias": True, "hidden_act": "relu", "head_dim": 32, ROPE: LLAMA3_LOW,
    },
    "llama, tied, biases, wide heads": {
        "mlp_bias": True, "head_dim": 14, "num_key_value_heads": 6,
    } | BIAS | TIED,
    "llama 3.1": {ROPE: LLAMA3, "head_dim": 32},
    "mistral": {},
    "mistral without a window": {"sliding_window": None},
    "qwen2": {},
    "qwen2, tied": {"num_key_value_heads": 6} | TIED,
    "qwen3": {},
    "qwen3, tied": {"num_key_value_heads": 1} | TIED,
    "qwen2 with windows": {
        "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1,
    },
    "qwen3, linear scaling": {
        ROPE: {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0},
    },
    "qwen3, yarn": {ROPE: YARN},
    "qwen3, bias in attention, yarn with mscale, not rounded": {
        ROPE: YARN | {"mscale": 0.7, "mscale_all_dim": 0.3, "truncate": False, "beta_fast": 3.0},
    } | BIAS,
    "phi3": {},
    "phi3, a window, a part rotated, tied": {
        "sliding_window": 7, "num_key_value_heads": 6,
        ROPE: {"partial_rotary_factor": 0.75, "rope_theta": 100.0},
    } | TIED,
    "phi3, long factors": {"original_max_position_embeddings": 16, ROPE: LONGROPE},
    "phi3, short factors": {"original_max_position_embeddings": 44, ROPE: LONGROPE},
    "olmo2": {},
    "olmo2, bias in attention, GeGLU": {"hidden_act": "gelu_pytorch_tanh"} | BIAS,
    "olmo3": {},
    "olmo3, yarn where there is no window": {
        ROPE: {
            "sliding_attention": {"rope_type": "default", "rope_theta": 700.0},
            "full_attention": YARN | {
                "rope_theta": 700.0, "factor": 8.0, "beta_fast": 9.0, "beta_slow": 0.5,
                "attention_factor": 1.2, "original_max_position_embeddings": 30,
            },
        },
    },
    "smollm3": {},
    "smollm3, tied": {
        "no_rope_layers": [1, 0, 0, 1], "use_sliding_window": True, "sliding_window": 6,
    } | TIED,
    "gemma2": {},
    "gemma2 without caps": {
        "attn_logit_softcapping": None, "final_logit_softcapping": None,
        "query_pre_attn_scalar": 17,
    },
    "gemma3": {},
    "gemma3, bias in attention": BIAS,
    "bloom": {},
    "bloom, residual behind the norm": {
        "apply_residual_connection_post_layernorm": True, "n_head": 4,
    },
    "gpt_neox": {},
    "gpt_neox, bias in the MLP, ReLU, linear scaling": {
        "attention_bias": False, "hidden_act": "relu",
        ROPE: {
            "partial_rotary_factor": 1.0, "rope_theta": 500.0, "rope_type": "linear",
            "factor": 1.5,
        },
    },
    "gpt_neox, parallel": {"use_parallel_residual": True},
    "gpt_neox, tied, a quarter rotated": {
        "hidden_act": "gelu_new", ROPE: {"partial_rotary_factor": 0.25, "rope_theta": 100.0},
    } | TIED,
}  # fmt: skip
MIXTURES = {
    "mixtral": {},
    "mixtral, a window, tied": {"sliding_window": 7} | TIED,
    "qwen2_moe": {},
    "qwen2_moe, every second layer, no bias, normalized": {
        "decoder_sparse_step": 2, "num_hidden_layers": 4, "qkv_bias": False,
        "norm_topk_prob": True,
    },
    "qwen3_moe": {},
    "qwen3_moe, a dense layer, a bias, not normalized": {
        "mlp_only_layers": [0], "norm_topk_prob": False,
    } | BIAS,
    "olmoe": {},
    "olmoe, normalized, all heads": {"norm_topk_prob": True, "num_key_value_heads": 6},
    "granitemoe": {},
    "granitemoe, tied, a bias": BIAS | TIED,
    "deepseek_v2": {},
    "deepseek_v2, as V2-Lite": {
        "q_lora_rank": None, "topk_method": "greedy", "n_group": 1, "topk_group": 1,
        ROPE: YARN_MSCALES, "routed_scaling_factor": 1.0,
    },
    "deepseek_v3": {},
    "deepseek_v3, yarn, a bias": {ROPE: YARN_MSCALES} | BIAS,
    "deepseek_v3, yarn with one mscale": {
        ROPE: {key: value for key, value in YARN_MSCALES.items() if key != "mscale"},
    },
    "deepseek_v3, as Moonlight": {
        "q_lora_rank": None, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.446,
        "rms_norm_eps": 1e-5,
    },
    "glm4_moe": {},
    "glm4_moe, groups, no norms, no biases": {
        "n_group": 4, "topk_group": 2, "use_qk_norm": False, "attention_bias": False,
        "n_shared_experts": 2, "head_dim": 16,
        ROPE: {"partial_rotary_factor": 0.25, "rope_theta": 500.0},
    },
    "minimax_m2": {},
    "minimax_m2, yarn, all heads, tied": {
        ROPE: YARN_MSCALES | {"partial_rotary_factor": 0.75}, "num_key_value_heads": 6,
    } | TIED,
    "gpt_oss": {},
    "gpt_oss, no bias in attention, windows of its own, not scaled": {
        "attention_bias": False, "layer_types": ["full_attention", "sliding_attention"],
        ROPE: {"rope_type": "default", "rope_theta": 500.0}, "num_key_value_heads": 6,
        "swiglu_limit": 7.0,
    },
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
    "ministral3": {"head_dim": 10, ROPE: SCALED_QUERIES},
    "ministral3, a window, tied": {
        "head_dim": 8, "sliding_window": 9, "hidden_act": "gelu",
        ROPE: SCALED_QUERIES | {"mscale_all_dim": 0.5, "truncate": False},
    } | TIED,
    "internlm3": {"head_dim": 10},
    "internlm3, biases, dynamic": {
        "head_dim": 8, "attention_bias": True, "mlp_bias": True,
        ROPE: {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 6.0},
    },
    "granite": MULTIPLIERS,
    "granite, biases, tied": MULTIPLIERS | {"mlp_bias": True} | BIAS | TIED,
    "glm": {"head_dim": 8},
    "glm, no bias, a quarter": {
        "head_dim": 8, "attention_bias": False,
        ROPE: {"partial_rotary_factor": 0.25, "rope_theta": 100.0},
    },
    "glm4": {"head_dim": 8},
    "glm4, no bias, all channels, tied": {
        "head_dim": 10, "attention_bias": False,
        ROPE: {"partial_rotary_factor": 1.0, "rope_theta": 100.0},
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
        "sliding_window": None, "layer_types": ["full_attention"] * 2, ROPE: LLAMA3_LOW,
    } | TIED,
    "olmo": {},
    "olmo, biases, tied": {"num_key_value_heads": 6} | BIAS | TIED,
    "gemma": {"head_dim": 10},
    "gemma, a bias, exact GELU, untied": {"head_dim": 6, "hidden_act": "gelu_python"}
    | BIAS | UNTIED,
    "nemotron": {"head_dim": 8},
    "nemotron, biases, a quarter": {
        "head_dim": 8, "mlp_bias": True, "hidden_act": "gelu",
        ROPE: {"partial_rotary_factor": 0.25, "rope_theta": 100.0},
    } | BIAS,
    "falcon": FALCON,
    "falcon, in a row, biases, untied": FALCON | {
        "parallel_attn": False, "bias": True, "ffn_hidden_size": 40,
    } | UNTIED,
    "falcon, all heads": FALCON | {"multi_query": False, "num_kv_heads": 6},
    "falcon 40b": NEW_FALCON,
    "falcon 2, biases": NEW_FALCON | {"num_ln_in_parallel_attn": 1, "bias": True},
    "stablelm": {ROPE: {"partial_rotary_factor": 0.7, "rope_theta": 10000.0}},
    "stablelm, norms of heads, parallel": {
        "qk_layernorm": True, "use_parallel_residual": True, "use_qkv_bias": True,
        ROPE: {"partial_rotary_factor": 0.4, "rope_theta": 100.0},
    } | TIED,
    "ernie4_5": {"head_dim": 10},
    "ernie4_5, biases, untied": {"head_dim": 8, "use_bias": True} | UNTIED,
    "hunyuan_v1_dense": {"head_dim": 10},
    "hunyuan_v1_dense, alpha, biases, tied": {
        "head_dim": 8,
        ROPE: {"rope_type": "dynamic", "alpha": 50.0, "rope_theta": 100.0,
                            "factor": 1.0},
    } | BIAS | TIED,
    "apertus": {},
    "apertus, another activation, biases, tied": {
        "hidden_act": "relu2", ROPE: {"rope_type": "default", "rope_theta": 100.0},
    } | BIAS | TIED,
    "helium": {"head_dim": 6},
    "helium, biases, tied": {"head_dim": 6, "mlp_bias": True, "num_key_value_heads": 1}
    | BIAS | TIED,
    "nanochat": {},
    "nanochat, biases, no cap, tied": {
        "final_logit_softcapping": None, "hidden_act": "gelu", "num_key_value_heads": 6,
    } | BIAS | TIED,
}  # fmt: skip
