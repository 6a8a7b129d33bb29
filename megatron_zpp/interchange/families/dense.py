"""The families of dense models, as rows of the table of families."""

from collections.abc import Iterable
from dataclasses import replace

from megatron_zpp.interchange.families import names
from megatron_zpp.interchange.families.family import Family, FamilySetting
from megatron_zpp.interchange.families.layers import LayersWithoutRope, Window
from megatron_zpp.interchange.families.rope import LONGROPE, Rotary, RotaryByLayer
from megatron_zpp.interchange.families.settings import (
    ACTIVATIONS,
    GATED_ACTIVATIONS,
    Choice,
    Number,
    activation,
    never,
    switch,
)

SCORE_SCALAR = "query_pre_attn_scalar"
SCALED_SCORES = {True: {SCORE_SCALAR: None}, False: {SCORE_SCALAR: 1.0}}
GPT2 = Family(
    name="gpt2",
    class_name="GPT2LMHeadModel",
    fields={},
    settings=(
        Number("n_layer", "num_layers", 12),
        Number("n_embd", "hidden_size", 768),
        Number("n_head", "num_attention_heads", 12),
        Number("n_inner", "ffn_hidden_size", None),
        Number("n_positions", "max_position_embeddings", 1024),
        Number("layer_norm_epsilon", "layernorm_epsilon", 1e-5),
        Number("initializer_range", "init_method_std", 0.02),
        Number("attn_pdrop", "attention_dropout", 0.1),
        Number("resid_pdrop", "hidden_dropout", 0.1, copies=("embd_pdrop",)),
        activation("activation_function", "gelu_new", ACTIVATIONS),
        Choice("scale_attn_weights", True, SCALED_SCORES),
        never("scale_attn_by_inverse_layer_idx"),
        never("add_cross_attention"),
    ),
    names=names.GPT2,
    vocab_size=50257,
    is_tied=True,
)
LLAMA_NUMBERS = (
    Number("num_hidden_layers", "num_layers", 32),
    Number("hidden_size", "hidden_size", 4096),
    Number("num_attention_heads", "num_attention_heads", 32),
    Number("num_key_value_heads", "num_query_groups", None),
    Number("head_dim", "kv_channels", None),
    Number("intermediate_size", "ffn_hidden_size", 11008),
    Number("max_position_embeddings", "max_position_embeddings", 2048),
    Number("rms_norm_eps", "layernorm_epsilon", 1e-6),
    Number("initializer_range", "init_method_std", 0.02),
    Number("attention_dropout", "attention_dropout", 0.0),
)
LLAMA_FIELDS = {"normalization": "RMSNorm", "hidden_dropout": 0.0, "disable_bias_linear": True}
SWIGLU = activation("hidden_act", "silu", GATED_ACTIVATIONS)
ATTENTION_BIAS = switch("attention_bias", False, "add_qkv_bias", "add_attention_output_bias")
MLP_BIAS = switch("mlp_bias", False, "add_mlp_bias")


def with_defaults(
    settings: Iterable[FamilySetting], **defaults: float
) -> tuple[FamilySetting, ...]:
    """Return settings with other defaults, by their keys."""
    return tuple(
        replace(setting, default=defaults[setting.key])
        if isinstance(setting, Number) and setting.key in defaults
        else setting
        for setting in settings
    )


LLAMA = Family(
    name="llama",
    class_name="LlamaForCausalLM",
    fields=LLAMA_FIELDS,
    settings=(*LLAMA_NUMBERS, SWIGLU, ATTENTION_BIAS, MLP_BIAS, Rotary()),
    names=names.LLAMA,
    vocab_size=32000,
)
MISTRAL = Family(
    name="mistral",
    class_name="MistralForCausalLM",
    fields=LLAMA_FIELDS,
    settings=(
        *with_defaults(
            LLAMA_NUMBERS,
            num_key_value_heads=8,
            intermediate_size=14336,
            max_position_embeddings=131072,
        ),
        SWIGLU,
        Rotary(),
        Window(default=4096),
    ),
    names=names.LLAMA,
    vocab_size=32000,
)
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
    names=names.LLAMA,
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
    names=names.QWEN3,
    vocab_size=151936,
)
PHI3 = Family(
    name="phi3",
    class_name="Phi3ForCausalLM",
    fields=LLAMA_FIELDS,
    settings=(
        *with_defaults(
            LLAMA_NUMBERS,
            hidden_size=3072,
            intermediate_size=8192,
            max_position_embeddings=4096,
            rms_norm_eps=1e-5,
        ),
        SWIGLU,
        Number("resid_pdrop", "hidden_dropout", 0.0, copies=("embd_pdrop",)),
        Rotary(is_partial=True, rope_types=("default", *LONGROPE), writes_longrope=True),
        Window(default=None),
    ),
    names=names.PHI3,
    vocab_size=32064,
)
OLMO_SETTINGS = (*with_defaults(LLAMA_NUMBERS, rms_norm_eps=1e-5), SWIGLU, ATTENTION_BIAS)
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
    names=names.OLMO2,
    vocab_size=50304,
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
SMOLLM3 = Family(
    name="smollm3",
    class_name="SmolLM3ForCausalLM",
    fields=LLAMA_FIELDS,
    settings=(
        *with_defaults(
            LLAMA_NUMBERS,
            num_hidden_layers=36,
            hidden_size=2048,
            num_attention_heads=16,
            num_key_value_heads=4,
            max_position_embeddings=32768,
        ),
        SWIGLU,
        Rotary(default_base=2000000.0),
        LayersWithoutRope(4),
        Window(default=None, switch="use_sliding_window", has_types=True),
        ATTENTION_BIAS,
        MLP_BIAS,
    ),
    names=names.LLAMA,
    vocab_size=128256,
    is_tied=True,
)
GEMMA_FIELDS = {
    **LLAMA_FIELDS,
    "apply_layernorm_1p": True,
    "norm_placement": "sandwich",
    "scale_embeddings": True,
}
GEMMA_SETTINGS = (
    *with_defaults(
        LLAMA_NUMBERS,
        num_hidden_layers=26,
        hidden_size=2304,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=256,
        intermediate_size=9216,
        max_position_embeddings=8192,
    ),
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
    names=names.GEMMA2,
    vocab_size=256000,
    is_tied=True,
)
GEMMA3 = Family(
    name="gemma3_text",
    class_name="Gemma3ForCausalLM",
    fields={**GEMMA_FIELDS, "qk_layernorm": True},
    settings=(
        *with_defaults(GEMMA_SETTINGS, max_position_embeddings=131072),
        Number("attn_logit_softcapping", "attn_logit_softcapping", None),
        Number("final_logit_softcapping", "final_logit_softcapping", None),
        RotaryByLayer(
            default_base=1000000.0, local_base="rope_local_base_freq", default_local_base=10000.0
        ),
        Window(default=4096, has_types=True, full_every=6, full_every_key="sliding_window_pattern"),
    ),
    names=names.GEMMA3,
    vocab_size=262208,
    is_tied=True,
)
GPT_NEOX = Family(
    name="gpt_neox",
    class_name="GPTNeoXForCausalLM",
    fields={"disable_bias_linear": True, "add_mlp_bias": True},
    settings=(
        Number("num_hidden_layers", "num_layers", 44),
        Number("hidden_size", "hidden_size", 6144),
        Number("num_attention_heads", "num_attention_heads", 64),
        Number("intermediate_size", "ffn_hidden_size", 24576),
        Number("max_position_embeddings", "max_position_embeddings", 2048),
        Number("layer_norm_eps", "layernorm_epsilon", 1e-5),
        Number("initializer_range", "init_method_std", 0.02),
        Number("attention_dropout", "attention_dropout", 0.0),
        Number("hidden_dropout", "hidden_dropout", 0.0),
        activation("hidden_act", "gelu", ACTIVATIONS),
        Rotary(base="rotary_emb_base", share="rotary_pct", default_share=0.25, is_partial=True),
        switch("use_parallel_residual", True, "use_parallel_residual"),
        replace(ATTENTION_BIAS, default=True),
    ),
    names=names.GPT_NEOX,
    vocab_size=50432,
)
LATE_RESIDUAL = "apply_residual_connection_post_layernorm"
BLOOM = Family(
    name="bloom",
    class_name="BloomForCausalLM",
    fields={
        "position_embedding_type": "alibi",
        "embed_layernorm": True,
        "ffn_hidden_size": None,
    },
    settings=(
        Number("n_layer", "num_layers", 2, old_keys=("num_hidden_layers",)),
        Number("hidden_size", "hidden_size", 64, old_keys=("n_embed",)),
        Number("n_head", "num_attention_heads", 8, old_keys=("num_attention_heads",)),
        Number("seq_length", "max_position_embeddings", 2048),
        Number("layer_norm_epsilon", "layernorm_epsilon", 1e-5),
        Number("initializer_range", "init_method_std", 0.02),
        Number("attention_dropout", "attention_dropout", 0.0),
        Number("hidden_dropout", "hidden_dropout", 0.0),
        switch(LATE_RESIDUAL, False, LATE_RESIDUAL),
    ),
    names=names.BLOOM,
    vocab_size=250880,
    is_tied=True,
)

DENSE = (
    GPT2,
    LLAMA,
    MISTRAL,
    QWEN2,
    QWEN3,
    PHI3,
    OLMO2,
    OLMO3,
    SMOLLM3,
    GEMMA2,
    GEMMA3,
    GPT_NEOX,
    BLOOM,
)
