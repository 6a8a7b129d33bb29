"""The families of mixtures of experts, as rows of the table of families."""

from dataclasses import replace

from megatron_zpp.interchange.families.dense.shared import (
    ATTENTION_BIAS,
    GRANITE_MULTIPLIERS,
    LLAMA_FIELDS,
    LLAMA_NUMBERS,
    SWIGLU,
)
from megatron_zpp.interchange.families.experts import (
    FirstDenseLayers,
    Groups,
    SharedExperts,
    SparseLayers,
)
from megatron_zpp.interchange.families.family import Family
from megatron_zpp.interchange.families.layers import Window
from megatron_zpp.interchange.families.rope import LatentRotary, Rotary
from megatron_zpp.interchange.families.settings import Absent, Choice, Number, never, switch
from megatron_zpp.model.mlp import QUICK_GELU

NORMALIZED = {True: {"moe_router_pre_softmax": False}, False: {"moe_router_pre_softmax": True}}
NORM_OF_BEST = Choice("norm_topk_prob", False, NORMALIZED)


def experts(key: str, default: int, chosen: int | None) -> tuple[Number, ...]:
    """Return the numbers of experts, and of those that a token chooses."""
    return (
        Number(key, "num_experts", default, old_keys=("num_local_experts", "num_experts")),
        Number("num_experts_per_tok", "moe_router_topk", chosen),
    )


def expert_width(default: int) -> Number:
    """Return the width of an expert where it is not that of dense layers."""
    return Number("moe_intermediate_size", "moe_ffn_hidden_size", default)


MIXTRAL = Family(
    name="mixtral",
    class_name="MixtralForCausalLM",
    fields=LLAMA_FIELDS,
    settings=(
        *LLAMA_NUMBERS,
        SWIGLU,
        Rotary(default_base=1000000.0),
        Window(default=None),
        *experts("num_local_experts", 8, 2),
    ),
)
QWEN2_MOE = Family(
    name="qwen2_moe",
    class_name="Qwen2MoeForCausalLM",
    fields={**LLAMA_FIELDS, "moe_shared_expert_gate": True},
    settings=(
        *LLAMA_NUMBERS,
        SWIGLU,
        switch("qkv_bias", True, "add_qkv_bias"),
        Rotary(),
        Window(default=4096, switch="use_sliding_window", has_types=True, full_every=2),
        *experts("num_experts", 60, 4),
        expert_width(1408),
        Number("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size", 5632),
        NORM_OF_BEST,
        SparseLayers(),
    ),
)
QWEN3_MOE = Family(
    name="qwen3_moe",
    class_name="Qwen3MoeForCausalLM",
    fields={**LLAMA_FIELDS, "qk_layernorm": True},
    settings=(
        *LLAMA_NUMBERS,
        SWIGLU,
        ATTENTION_BIAS,
        Rotary(),
        Window(default=4096, switch="use_sliding_window"),
        *experts("num_experts", 128, 8),
        expert_width(768),
        NORM_OF_BEST,
        SparseLayers(),
    ),
)
OLMOE = Family(
    name="olmoe",
    class_name="OlmoeForCausalLM",
    fields={**LLAMA_FIELDS, "qk_layernorm": True, "qk_layernorm_across_heads": True},
    settings=(
        *LLAMA_NUMBERS,
        SWIGLU,
        ATTENTION_BIAS,
        Absent("clip_qkv"),
        Rotary(),
        *experts("num_experts", 64, 8),
        NORM_OF_BEST,
    ),
)
GRANITE_MOE = Family(
    name="granitemoe",
    class_name="GraniteMoeForCausalLM",
    fields=LLAMA_FIELDS,
    settings=(
        *LLAMA_NUMBERS,
        SWIGLU,
        ATTENTION_BIAS,
        Rotary(),
        *GRANITE_MULTIPLIERS,
        *experts("num_local_experts", 8, 2),
    ),
)
LATENT_FIELDS = {
    **LLAMA_FIELDS,
    "multi_latent_attention": True,
    "qk_layernorm": True,
    "moe_router_dtype": "fp32",
}
LATENT_NUMBERS = (
    *(number for number in LLAMA_NUMBERS if number.key != "head_dim"),
    Number("q_lora_rank", "q_lora_rank", 1536, may_be_none=True),
    Number("kv_lora_rank", "kv_lora_rank", 512),
    Number("qk_nope_head_dim", "qk_head_dim", 128),
    Number("qk_rope_head_dim", "qk_pos_emb_head_dim", 64),
    Number("v_head_dim", "v_head_dim", 128),
)
DEEPSEEK_V2 = Family(
    name="deepseek_v2",
    class_name="DeepseekV2ForCausalLM",
    fields={**LATENT_FIELDS, "moe_router_pre_softmax": True},
    settings=(
        *LATENT_NUMBERS,
        SWIGLU,
        ATTENTION_BIAS,
        never("mlp_bias"),
        LatentRotary(),
        *experts("n_routed_experts", 64, None),
        expert_width(1407),
        SharedExperts(2, 1407),
        FirstDenseLayers(0),
        Groups(1, {"greedy": False, "group_limited_greedy": True}),
        Number("routed_scaling_factor", "moe_router_topk_scaling_factor", 1.0),
        Choice("scoring_func", "softmax", {"softmax": {"moe_router_score_function": "softmax"}}),
        never("norm_topk_prob"),
    ),
)
DEEPSEEK_V3 = Family(
    name="deepseek_v3",
    class_name="DeepseekV3ForCausalLM",
    fields={**LATENT_FIELDS, "moe_router_enable_expert_bias": True},
    settings=(
        *LATENT_NUMBERS,
        SWIGLU,
        ATTENTION_BIAS,
        LatentRotary(),
        Choice("rope_interleave", True, {True: {}}),
        *experts("n_routed_experts", 256, 8),
        expert_width(2048),
        SharedExperts(1, 2048),
        FirstDenseLayers(3),
        Groups(2, {"noaux_tc": True}, default=8, default_chosen=4),
        Number("routed_scaling_factor", "moe_router_topk_scaling_factor", 2.5),
        Choice("scoring_func", "sigmoid", {"sigmoid": {"moe_router_score_function": "sigmoid"}}),
        Choice("norm_topk_prob", True, {True: {}}),
    ),
    further_layers="num_nextn_predict_layers",
)
SIGMOID = {"moe_router_dtype": "fp32", "moe_router_score_function": "sigmoid"}
GLM4_MOE = Family(
    name="glm4_moe",
    class_name="Glm4MoeForCausalLM",
    fields={**LLAMA_FIELDS, **SIGMOID, "moe_router_enable_expert_bias": True},
    settings=(
        *LLAMA_NUMBERS,
        SWIGLU,
        switch("attention_bias", False, "add_qkv_bias"),
        switch("use_qk_norm", False, "qk_layernorm"),
        Rotary(default_share=0.5, is_partial=True),
        *experts("n_routed_experts", 128, 8),
        expert_width(1408),
        SharedExperts(1, 1408),
        FirstDenseLayers(1),
        Groups(2, {"noaux_tc": True}, default=1, default_chosen=1),
        Number("routed_scaling_factor", "moe_router_topk_scaling_factor", 1.0),
        Choice("norm_topk_prob", True, {True: {}}),
    ),
    further_layers="num_nextn_predict_layers",
)
MINIMAX_M2 = Family(
    name="minimax_m2",
    class_name="MiniMaxM2ForCausalLM",
    fields={
        **LLAMA_FIELDS,
        **SIGMOID,
        "moe_router_enable_expert_bias": True,
        "qk_layernorm": True,
        "qk_layernorm_across_heads": True,
    },
    settings=(
        *LLAMA_NUMBERS,
        SWIGLU,
        Rotary(default_base=5000000.0, is_partial=True, channels="rotary_dim"),
        *experts("num_local_experts", 256, 8),
    ),
)
GPT_OSS = Family(
    name="gpt_oss",
    class_name="GptOssForCausalLM",
    fields={
        **LLAMA_FIELDS,
        "add_mlp_bias": True,
        "quick_geglu": True,
        "glu_linear_offset": 1.0,
        "softmax_type": "learnable",
    },
    settings=(
        *LLAMA_NUMBERS,
        Choice("hidden_act", "silu", {"silu": {}}),
        Choice("swiglu_alpha", QUICK_GELU, {QUICK_GELU: {}}),
        Number("swiglu_limit", "activation_func_clamp_value", 7.0),
        switch("attention_bias", True, "add_qkv_bias", "add_attention_output_bias"),
        Rotary(default_base=150000.0),
        Window(default=128, has_types=True, full_every=2),
        *experts("num_local_experts", 128, 4),
    ),
    packed_weights=("mxfp4",),
)
KIMI_K2 = replace(DEEPSEEK_V3, name="kimi_k2")  # as its file calls it; the same model
MIXTURES = (
    *(MIXTRAL, QWEN2_MOE, QWEN3_MOE, OLMOE, GRANITE_MOE, DEEPSEEK_V2, DEEPSEEK_V3, KIMI_K2),
    *(GLM4_MOE, MINIMAX_M2, GPT_OSS),
)
