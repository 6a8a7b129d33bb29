"""Gemma 1, 2 and 3: gains stored minus 1, scaled embeddings, GeGLU."""

from megatron_zpp.interchange.families.dense.shared import (
    ATTENTION_BIAS,
    LLAMA_FIELDS,
    LLAMA_NUMBERS,
    SCORE_SCALAR,
)
from megatron_zpp.interchange.families.family import Family
from megatron_zpp.interchange.families.layers import Window
from megatron_zpp.interchange.families.rope import Rotary, RotaryByLayer
from megatron_zpp.interchange.families.settings import (
    GATED_ACTIVATIONS,
    Number,
    activation,
    never,
)

GEMMA1_FIELDS = {**LLAMA_FIELDS, "apply_layernorm_1p": True, "scale_embeddings": True}
GEMMA = Family(
    name="gemma",
    class_name="GemmaForCausalLM",
    fields=GEMMA1_FIELDS,
    settings=(
        *LLAMA_NUMBERS,
        ATTENTION_BIAS,
        activation(  # released files say gelu where they mean its tanh form
            "hidden_act",
            "gelu_pytorch_tanh",
            {**GATED_ACTIVATIONS, "gelu": GATED_ACTIVATIONS["gelu_pytorch_tanh"]},
        ),
        Rotary(),
        never("use_bidirectional_attention"),
    ),
)
GEMMA_FIELDS = {**GEMMA1_FIELDS, "norm_placement": "sandwich"}
GEMMA_SETTINGS = (
    *LLAMA_NUMBERS,
    ATTENTION_BIAS,
    activation("hidden_activation", "gelu_pytorch_tanh", GATED_ACTIVATIONS),
    Number("query_pre_attn_scalar", SCORE_SCALAR, 256),
    never("use_bidirectional_attention"),
)
GEMMA2 = Family(
    name="gemma2",
    class_name="Gemma2ForCausalLM",
    fields=GEMMA_FIELDS,
    settings=(
        *GEMMA_SETTINGS,
        Number("attn_logit_softcapping", "attn_logit_softcapping", 50.0, may_be_none=True),
        Number("final_logit_softcapping", "final_logit_softcapping", 30.0, may_be_none=True),
        Rotary(),
        Window(default=4096, has_types=True, full_every=2),
    ),
)
GEMMA3 = Family(
    name="gemma3_text",
    class_name="Gemma3ForCausalLM",
    fields={**GEMMA_FIELDS, "qk_layernorm": True},
    settings=(
        *GEMMA_SETTINGS,
        Number("attn_logit_softcapping", "attn_logit_softcapping", None),
        Number("final_logit_softcapping", "final_logit_softcapping", None),
        RotaryByLayer(
            default_base=1000000.0, local_base="rope_local_base_freq", default_local_base=10000.0
        ),
        Window(default=4096, has_types=True, full_every=6, full_every_key="sliding_window_pattern"),
    ),
)
