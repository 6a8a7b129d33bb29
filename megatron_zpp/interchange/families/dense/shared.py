"""Settings that many families have in common: those of Llama."""

from dataclasses import replace

from megatron_zpp.interchange.families.family import FamilySetting
from megatron_zpp.interchange.families.settings import (
    GATED_ACTIVATIONS,
    Choice,
    Number,
    Power,
    activation,
    switch,
)

SCORE_SCALAR = "query_pre_attn_scalar"
HEAD_WIDTH, EPSILON = "head_dim", "rms_norm_eps"
LLAMA_NUMBERS = (
    Number("num_hidden_layers", "num_layers", 32),
    Number("hidden_size", "hidden_size", 4096),
    Number("num_attention_heads", "num_attention_heads", 32),
    Number("num_key_value_heads", "num_query_groups", None),
    Number(HEAD_WIDTH, "kv_channels", None),
    Number("intermediate_size", "ffn_hidden_size", 11008),
    Number("max_position_embeddings", "max_position_embeddings", 2048),
    Number(EPSILON, "layernorm_epsilon", 1e-6),
    Number("initializer_range", "init_method_std", 0.02),
    Number("attention_dropout", "attention_dropout", 0.0),
)
GATED_FIELDS = {"hidden_dropout": 0.0, "disable_bias_linear": True}
LLAMA_FIELDS = {**GATED_FIELDS, "normalization": "RMSNorm"}
SWIGLU = activation("hidden_act", "silu", GATED_ACTIVATIONS)
ATTENTION_BIAS = switch("attention_bias", False, "add_qkv_bias", "add_attention_output_bias")
QKV_BIAS = switch("attention_bias", False, "add_qkv_bias")
MLP_BIAS = switch("mlp_bias", False, "add_mlp_bias")
GRANITE_MULTIPLIERS = (
    Power("attention_multiplier", SCORE_SCALAR, -2, 1.0),
    Number("embedding_multiplier", "embedding_multiplier", 1.0),
    Number("residual_multiplier", "residual_multiplier", 1.0),
    Number("logits_scaling", "logits_scaling", 1.0),
)


def all_biases(key: str, default: bool) -> Choice:
    """Return the setting of a key that is true if all linear layers have biases."""
    return Choice(
        key, default, {value: {"disable_bias_linear": not value} for value in (True, False)}
    )


def llama_numbers(
    *, without: tuple[str, ...] = (), epsilon: str = EPSILON
) -> tuple[FamilySetting, ...]:
    """Return Llama's numbers but for some keys, with another key of epsilon."""
    return tuple(
        replace(number, key=epsilon) if number.key == EPSILON else number
        for number in LLAMA_NUMBERS
        if number.key not in without
    )
