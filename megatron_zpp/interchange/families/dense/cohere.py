"""Cohere, Cohere 2 and StableLM: LayerNorm, which parallel branches share, and gated MLPs."""

from megatron_zpp.interchange.families.dense.shared import (
    ATTENTION_BIAS,
    GATED_FIELDS,
    HEAD_WIDTH,
    SWIGLU,
    llama_numbers,
)
from megatron_zpp.interchange.families.family import Family
from megatron_zpp.interchange.families.layers import RopeInWindows
from megatron_zpp.interchange.families.rope import Rotary
from megatron_zpp.interchange.families.settings import Number, Power, switch

COHERE_FIELDS = {
    **GATED_FIELDS,
    "rotary_interleaved": True,
    "disable_norm_bias": True,
    "use_parallel_residual": True,
    "parallel_residual_single_norm": True,
}
COHERE_SETTINGS = (
    *llama_numbers(without=(HEAD_WIDTH,), epsilon="layer_norm_eps"),
    Power("logit_scale", "logits_scaling", -1, 0.0625),
    SWIGLU,
    ATTENTION_BIAS,
)
COHERE = Family(
    name="cohere",
    class_name="CohereForCausalLM",
    fields=COHERE_FIELDS,
    settings=(
        *COHERE_SETTINGS,
        Rotary(default_base=500000.0),
        switch("use_qk_norm", False, "qk_layernorm", "qk_layernorm_per_head"),
    ),
)
COHERE2 = Family(
    name="cohere2",
    class_name="Cohere2ForCausalLM",
    fields=COHERE_FIELDS,
    settings=(
        *COHERE_SETTINGS,
        Rotary(),
        RopeInWindows(
            default=4096,
            has_types=True,
            full_every=4,
            full_every_key="sliding_window_pattern",
            may_be_null=False,
        ),
    ),
)
STABLELM = Family(
    name="stablelm",
    class_name="StableLmForCausalLM",
    fields=GATED_FIELDS,
    settings=(
        *llama_numbers(without=(HEAD_WIDTH,), epsilon="layer_norm_eps"),
        Number("hidden_dropout", "hidden_dropout", 0.0),
        SWIGLU,
        switch("use_qkv_bias", False, "add_qkv_bias"),
        switch("qk_layernorm", False, "qk_layernorm", "qk_layernorm_per_head"),
        switch(
            "use_parallel_residual",
            False,
            "use_parallel_residual",
            "parallel_residual_single_norm",
        ),
        Rotary(is_partial=True, default_share=0.25),
    ),
)
