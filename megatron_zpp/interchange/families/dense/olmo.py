"""OLMo 1, 2 and 3, and EXAONE 4, which normalizes as OLMo 2 does."""

from dataclasses import replace

from megatron_zpp.interchange.families.dense.shared import (
    ATTENTION_BIAS,
    EPSILON,
    GATED_FIELDS,
    LLAMA_FIELDS,
    LLAMA_NUMBERS,
    SWIGLU,
    llama_numbers,
)
from megatron_zpp.interchange.families.family import Family
from megatron_zpp.interchange.families.layers import RopeInWindows, Window
from megatron_zpp.interchange.families.rope import Rotary, RotaryByLayer
from megatron_zpp.interchange.families.settings import Absent

OLMO = Family(
    name="olmo",
    class_name="OlmoForCausalLM",
    fields={**GATED_FIELDS, "disable_norm_gain": True, "layernorm_epsilon": 1e-5},
    settings=(
        *llama_numbers(without=(EPSILON,)),
        SWIGLU,
        ATTENTION_BIAS,
        Absent("clip_qkv"),
        Rotary(),
    ),
)
OLMO_SETTINGS = (*LLAMA_NUMBERS, SWIGLU, ATTENTION_BIAS)
OLMO2 = Family(
    name="olmo2",
    class_name="Olmo2ForCausalLM",
    fields={
        **LLAMA_FIELDS,
        "norm_placement": "post",
        "qk_layernorm": True,
        "qk_layernorm_across_heads": True,
    },
    settings=(*OLMO_SETTINGS, Rotary()),
)
OLMO3 = replace(
    OLMO2,
    name="olmo3",
    class_name="Olmo3ForCausalLM",
    settings=(
        *OLMO_SETTINGS,
        RotaryByLayer(default_base=500000.0),
        Window(default=4096, has_types=True, full_every=4),
    ),
)
EXAONE4 = Family(
    name="exaone4",
    class_name="Exaone4ForCausalLM",
    fields={**LLAMA_FIELDS, "norm_placement": "post", "qk_layernorm": True},
    settings=(
        *LLAMA_NUMBERS,
        SWIGLU,
        Rotary(),
        RopeInWindows(
            default=4096, has_types=True, full_every=4, full_every_key="sliding_window_pattern"
        ),
    ),
)
