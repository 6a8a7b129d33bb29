"""Qwen2 and Qwen3, and Seed-OSS, which is a Qwen2 with other biases."""

from megatron_zpp.interchange.families.dense.shared import (
    ATTENTION_BIAS,
    LLAMA_FIELDS,
    LLAMA_NUMBERS,
    MLP_BIAS,
    SWIGLU,
    llama_numbers,
    with_defaults,
)
from megatron_zpp.interchange.families.family import Family
from megatron_zpp.interchange.families.layers import Window
from megatron_zpp.interchange.families.names import LLAMA, QK_NORMS, llama_with
from megatron_zpp.interchange.families.rope import Rotary
from megatron_zpp.interchange.families.settings import Number, switch

QWEN_NUMBERS = with_defaults(
    LLAMA_NUMBERS, num_key_value_heads=32, intermediate_size=22016, max_position_embeddings=32768
)
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
    settings=(*QWEN_NUMBERS, SWIGLU, Rotary(), QWEN_WINDOW),
    names=LLAMA,
    vocab_size=151936,
)
QWEN3 = Family(
    name="qwen3",
    class_name="Qwen3ForCausalLM",
    fields={**LLAMA_FIELDS, "qk_layernorm": True},
    settings=(
        *with_defaults(QWEN_NUMBERS, head_dim=128),
        SWIGLU,
        ATTENTION_BIAS,
        Rotary(),
        QWEN_WINDOW,
    ),
    names=llama_with(*QK_NORMS),
    vocab_size=151936,
)
SEED_OSS = Family(
    name="seed_oss",
    class_name="SeedOssForCausalLM",
    fields=LLAMA_FIELDS,
    settings=(
        *llama_numbers(
            num_hidden_layers=64,
            num_attention_heads=80,
            num_key_value_heads=8,
            head_dim=128,
            intermediate_size=27648,
            max_position_embeddings=524288,
            attention_dropout=0.1,
        ),
        Number("residual_dropout", "hidden_dropout", 0.1),
        SWIGLU,
        switch("attention_bias", True, "add_qkv_bias"),
        switch("attention_out_bias", False, "add_attention_output_bias"),
        MLP_BIAS,
        Rotary(),
    ),
    names=LLAMA,
    vocab_size=155136,
)
