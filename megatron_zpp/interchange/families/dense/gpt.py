"""GPT-2, GPT-NeoX and BLOOM: LayerNorm, biases and an MLP without a gate."""

from dataclasses import replace

from megatron_zpp.interchange.families.dense.shared import ATTENTION_BIAS, SCORE_SCALAR
from megatron_zpp.interchange.families.family import Family
from megatron_zpp.interchange.families.rope import Rotary
from megatron_zpp.interchange.families.settings import (
    ACTIVATIONS,
    Choice,
    Number,
    activation,
    never,
    switch,
)

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
)
