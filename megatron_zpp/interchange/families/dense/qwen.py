"""Qwen2 and Qwen3, and Seed-OSS, which is a Qwen2 with other biases."""

from megatron_zpp.interchange.families.dense.shared import (
    ATTENTION_BIAS,
    LLAMA_FIELDS,
    LLAMA_NUMBERS,
    MLP_BIAS,
    SWIGLU,
)
from megatron_zpp.interchange.families.family import Family
from megatron_zpp.interchange.families.layers import Window
from megatron_zpp.interchange.families.rope import Rotary
from megatron_zpp.interchange.families.settings import Number, switch

QWEN_WINDOW = Window(
    default=4096,
    switch="use_sliding_window",
    has_types=True,
    num_full_key="max_window_layers",
    default_num_full=28,
)
QWEN2 = Family(
    name="qwen2",
    class_name="Qwen2ForCausalLM",
    fields={**LLAMA_FIELDS, "add_qkv_bias": True},
    settings=(*LLAMA_NUMBERS, SWIGLU, Rotary(), QWEN_WINDOW),
)
QWEN3 = Family(
    name="qwen3",
    class_name="Qwen3ForCausalLM",
    fields={**LLAMA_FIELDS, "qk_layernorm": True},
    settings=(*LLAMA_NUMBERS, SWIGLU, ATTENTION_BIAS, Rotary(), QWEN_WINDOW),
)
SEED_OSS = Family(
    name="seed_oss",
    class_name="SeedOssForCausalLM",
    fields=LLAMA_FIELDS,
    settings=(
        *LLAMA_NUMBERS,
        Number("residual_dropout", "hidden_dropout", 0.1),
        SWIGLU,
        switch("attention_bias", True, "add_qkv_bias"),
        switch("attention_out_bias", False, "add_attention_output_bias"),
        MLP_BIAS,
        Rotary(),
    ),
)
