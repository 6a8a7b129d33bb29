"""GPT-2, GPT-NeoX and BLOOM: LayerNorm, biases and an MLP without a gate."""

from dataclasses import replace

from megatron_zpp.interchange.families.dense.shared import ATTENTION_BIAS, SCORE_SCALAR
from megatron_zpp.interchange.families.family import Family
from megatron_zpp.interchange.families.forms import PADDED_VOCABULARY, QKV_TRANSPOSED, TRANSPOSED
from megatron_zpp.interchange.families.names import NameRow, NameTable
from megatron_zpp.interchange.families.rope import Rotary
from megatron_zpp.interchange.families.settings import (
    ACTIVATIONS,
    Choice,
    Number,
    activation,
    never,
    switch,
)

GPT2_BLOCK = "transformer.h.{}."
GPT2_NAMES = NameTable(
    rows=(
        NameRow("tokens", ("transformer.wte",), PADDED_VOCABULARY),
        NameRow("positions", ("transformer.wpe",)),
        NameRow("blocks.{}.norm1", (GPT2_BLOCK + "ln_1",)),
        NameRow("blocks.{}.attention.qkv", (GPT2_BLOCK + "attn.c_attn",), QKV_TRANSPOSED),
        NameRow("blocks.{}.attention.output", (GPT2_BLOCK + "attn.c_proj",), TRANSPOSED),
        NameRow("blocks.{}.norm2", (GPT2_BLOCK + "ln_2",)),
        NameRow("blocks.{}.mlp.input", (GPT2_BLOCK + "mlp.c_fc",), TRANSPOSED),
        NameRow("blocks.{}.mlp.output", (GPT2_BLOCK + "mlp.c_proj",), TRANSPOSED),
        NameRow("norm", ("transformer.ln_f",)),
        NameRow("head", ("lm_head",), PADDED_VOCABULARY),
    ),
    prefix="transformer.",
    embedding="transformer.wte.weight",
    constants=r"transformer\.h\.\d+\.attn\.(masked_)?bias",
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
    names=GPT2_NAMES,
)
GPT_NEOX_BLOCK = "gpt_neox.layers.{}."
GPT_NEOX_NAMES = NameTable(
    rows=(
        NameRow("tokens", ("gpt_neox.embed_in",), PADDED_VOCABULARY),
        NameRow("blocks.{}.norm1", (GPT_NEOX_BLOCK + "input_layernorm",)),
        NameRow("blocks.{}.attention.qkv", (GPT_NEOX_BLOCK + "attention.query_key_value",)),
        NameRow("blocks.{}.attention.output", (GPT_NEOX_BLOCK + "attention.dense",)),
        NameRow("blocks.{}.norm2", (GPT_NEOX_BLOCK + "post_attention_layernorm",)),
        NameRow("blocks.{}.mlp.input", (GPT_NEOX_BLOCK + "mlp.dense_h_to_4h",)),
        NameRow("blocks.{}.mlp.output", (GPT_NEOX_BLOCK + "mlp.dense_4h_to_h",)),
        NameRow("norm", ("gpt_neox.final_layer_norm",)),
        NameRow("head", ("embed_out",), PADDED_VOCABULARY),
    ),
    prefix="gpt_neox.",
    embedding="gpt_neox.embed_in.weight",
    constants=r"gpt_neox\.layers\.\d+\.attention\.((masked_)?bias|rotary_emb\.inv_freq)",
    head="embed_out.weight",
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
    names=GPT_NEOX_NAMES,
)
BLOOM_BLOCK = "transformer.h.{}."
BLOOM_NAMES = NameTable(
    rows=(
        NameRow("tokens", ("transformer.word_embeddings",), PADDED_VOCABULARY),
        NameRow("embed_norm", ("transformer.word_embeddings_layernorm",)),
        NameRow("blocks.{}.norm1", (BLOOM_BLOCK + "input_layernorm",)),
        NameRow("blocks.{}.attention.qkv", (BLOOM_BLOCK + "self_attention.query_key_value",)),
        NameRow("blocks.{}.attention.output", (BLOOM_BLOCK + "self_attention.dense",)),
        NameRow("blocks.{}.norm2", (BLOOM_BLOCK + "post_attention_layernorm",)),
        NameRow("blocks.{}.mlp.input", (BLOOM_BLOCK + "mlp.dense_h_to_4h",)),
        NameRow("blocks.{}.mlp.output", (BLOOM_BLOCK + "mlp.dense_4h_to_h",)),
        NameRow("norm", ("transformer.ln_f",)),
        NameRow("head", ("lm_head",), PADDED_VOCABULARY),
    ),
    prefix="transformer.",
    embedding="transformer.word_embeddings.weight",
    constants=r"transformer\.h\.\d+\.self_attention\.(masked_)?bias",
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
    names=BLOOM_NAMES,
)
