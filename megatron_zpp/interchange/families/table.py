"""The table of families: a row for each `model_type` of Hugging Face that our GPT can be.

A row composes settings (`settings.py`, `rope.py`) and the names of weights (`names.py`).
"""

from dataclasses import replace
from types import MappingProxyType
from typing import Any

from megatron_zpp.interchange.families import names
from megatron_zpp.interchange.families.family import Family
from megatron_zpp.interchange.families.layers import LayersWithoutRope, Window
from megatron_zpp.interchange.families.rope import LONGROPE, Rotary, RotaryByLayer
from megatron_zpp.interchange.families.settings import (
    ACTIVATIONS,
    GATED_ACTIVATIONS,
    Activation,
    AddedBias,
    Always,
    AttentionBias,
    Copy,
    Number,
    Only,
    ScaledScores,
    Switch,
)

GPT2 = Family(
    name="gpt2",
    class_name="GPT2LMHeadModel",
    settings=(
        Number("n_layer", "num_layers", 12),
        Number("n_embd", "hidden_size", 768),
        Number("n_head", "num_attention_heads", 12),
        Number("n_inner", "ffn_hidden_size", None),
        Number("n_positions", "max_position_embeddings", 1024),
        Number("layer_norm_epsilon", "layernorm_epsilon", 1e-5),
        Number("initializer_range", "init_method_std", 0.02),
        Number("attn_pdrop", "attention_dropout", 0.1),
        Number("resid_pdrop", "hidden_dropout", 0.1),
        Copy("embd_pdrop", "hidden_dropout"),
        Activation("activation_function", "gelu_new", ACTIVATIONS),
        ScaledScores("scale_attn_weights"),
        Only("scale_attn_by_inverse_layer_idx", False, False),
        Only("add_cross_attention", False, False),
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
LLAMA_BLOCK = (
    Always(MappingProxyType({"normalization": "RMSNorm", "hidden_dropout": 0.0})),
    Activation("hidden_act", "silu", GATED_ACTIVATIONS),
)
NO_BIASES = Always(MappingProxyType({"disable_bias_linear": True}))
BIAS_OF_ATTENTION = (NO_BIASES, AttentionBias())
LLAMA_BIASES = (*BIAS_OF_ATTENTION, AddedBias("mlp_bias", "add_mlp_bias"))


def llama_numbers(**defaults: int) -> tuple[Number, ...]:
    """Return the numbers of a Llama with other defaults, by their keys."""
    return tuple(
        replace(number, default=defaults.get(number.key, number.default))
        for number in LLAMA_NUMBERS
    )


def always(**fields: Any) -> Always:
    """Return a setting that every model of a family has."""
    return Always(MappingProxyType(fields))


LLAMA = Family(
    name="llama",
    class_name="LlamaForCausalLM",
    settings=(*LLAMA_NUMBERS, *LLAMA_BLOCK, *LLAMA_BIASES, Rotary()),
    names=names.LLAMA,
    vocab_size=32000,
)
MISTRAL = Family(
    name="mistral",
    class_name="MistralForCausalLM",
    settings=(
        *llama_numbers(
            num_key_value_heads=8, intermediate_size=14336, max_position_embeddings=131072
        ),
        *LLAMA_BLOCK,
        NO_BIASES,
        Rotary(),
        Window(default=4096),
    ),
    names=names.LLAMA,
    vocab_size=32000,
)
QWEN_WINDOW = Window(
    default=4096, switch="use_sliding_window", has_types=True, num_full_key="max_window_layers",
    default_num_full=28,
)  # fmt: skip
QWEN2 = Family(
    name="qwen2",
    class_name="Qwen2ForCausalLM",
    settings=(
        *llama_numbers(
            num_key_value_heads=32, intermediate_size=22016, max_position_embeddings=32768
        ),
        *LLAMA_BLOCK,
        always(disable_bias_linear=True, add_qkv_bias=True),
        Rotary(),
        QWEN_WINDOW,
    ),
    names=names.LLAMA,
    vocab_size=151936,
)
QWEN3 = Family(
    name="qwen3",
    class_name="Qwen3ForCausalLM",
    settings=(
        *llama_numbers(
            num_key_value_heads=32, head_dim=128, intermediate_size=22016,
            max_position_embeddings=32768,
        ),
        *LLAMA_BLOCK,
        *BIAS_OF_ATTENTION,
        always(qk_layernorm=True),
        Rotary(),
        QWEN_WINDOW,
    ),
    names=names.QWEN3,
    vocab_size=151936,
)  # fmt: skip
PHI3 = Family(
    name="phi3",
    class_name="Phi3ForCausalLM",
    settings=(
        *llama_numbers(
            hidden_size=3072, intermediate_size=8192, max_position_embeddings=4096,
            rms_norm_eps=1e-5,
        ),
        *LLAMA_BLOCK,
        NO_BIASES,
        Number("resid_pdrop", "hidden_dropout", 0.0),
        Copy("embd_pdrop", "hidden_dropout"),
        Rotary(is_partial=True, rope_types=("default", *LONGROPE), writes_longrope=True),
        Window(default=None),
    ),
    names=names.PHI3,
    vocab_size=32064,
)  # fmt: skip
OLMO_NORMS = always(norm_placement="post", qk_layernorm=True, qk_layernorm_across_heads=True)
OLMO2 = Family(
    name="olmo2",
    class_name="Olmo2ForCausalLM",
    settings=(
        *llama_numbers(rms_norm_eps=1e-5),
        *LLAMA_BLOCK,
        *BIAS_OF_ATTENTION,
        OLMO_NORMS,
        Rotary(),
    ),
    names=names.OLMO2,
    vocab_size=50304,
)
OLMO3 = replace(
    OLMO2,
    name="olmo3",
    class_name="Olmo3ForCausalLM",
    settings=(
        *llama_numbers(rms_norm_eps=1e-5),
        *LLAMA_BLOCK,
        *BIAS_OF_ATTENTION,
        OLMO_NORMS,
        RotaryByLayer(default_base=500000.0),
        Window(default=4096, has_types=True, full_every=4),
    ),
)
SMOLLM3 = Family(
    name="smollm3",
    class_name="SmolLM3ForCausalLM",
    settings=(
        *llama_numbers(
            num_hidden_layers=36, hidden_size=2048, num_attention_heads=16, num_key_value_heads=4,
            max_position_embeddings=32768,
        ),
        *LLAMA_BLOCK,
        Rotary(default_base=2000000.0),
        LayersWithoutRope(4),
        Window(default=None, switch="use_sliding_window", has_types=True),
        *LLAMA_BIASES,
    ),
    names=names.LLAMA,
    vocab_size=128256,
    is_tied=True,
)  # fmt: skip
GEMMA_BLOCK = (
    *llama_numbers(
        num_hidden_layers=26, hidden_size=2304, num_attention_heads=8, num_key_value_heads=4,
        head_dim=256, intermediate_size=9216, max_position_embeddings=8192,
    ),
    always(
        normalization="RMSNorm", apply_layernorm_1p=True, norm_placement="sandwich",
        scale_embeddings=True, hidden_dropout=0.0,
    ),
    *BIAS_OF_ATTENTION,
    Activation("hidden_activation", "gelu_pytorch_tanh", GATED_ACTIVATIONS),
    Number("query_pre_attn_scalar", "query_pre_attn_scalar", 256),
    Only("use_bidirectional_attention", False, False),
)  # fmt: skip
GEMMA2 = Family(
    name="gemma2",
    class_name="Gemma2ForCausalLM",
    settings=(
        *GEMMA_BLOCK,
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
    settings=(
        *GEMMA_BLOCK,
        Number("max_position_embeddings", "max_position_embeddings", 131072),
        always(qk_layernorm=True),
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
        Activation("hidden_act", "gelu", ACTIVATIONS),
        Rotary(
            base="rotary_emb_base", share="rotary_pct", default_share=0.25, is_partial=True
        ),
        Switch("use_parallel_residual", "use_parallel_residual", True),
        always(disable_bias_linear=True, add_mlp_bias=True),
        AttentionBias(default=True),
    ),
    names=names.GPT_NEOX,
    vocab_size=50432,
)  # fmt: skip
BLOOM = Family(
    name="bloom",
    class_name="BloomForCausalLM",
    settings=(
        always(position_embedding_type="alibi", embed_layernorm=True, ffn_hidden_size=None),
        Number("n_layer", "num_layers", 2, old_keys=("num_hidden_layers",)),
        Number("hidden_size", "hidden_size", 64, old_keys=("n_embed",)),
        Number("n_head", "num_attention_heads", 8, old_keys=("num_attention_heads",)),
        Number("seq_length", "max_position_embeddings", 2048),
        Number("layer_norm_epsilon", "layernorm_epsilon", 1e-5),
        Number("initializer_range", "init_method_std", 0.02),
        Number("attention_dropout", "attention_dropout", 0.0),
        Number("hidden_dropout", "hidden_dropout", 0.0),
        Switch(
            "apply_residual_connection_post_layernorm", "apply_residual_connection_post_layernorm",
            False,
        ),
    ),
    names=names.BLOOM,
    vocab_size=250880,
    is_tied=True,
)  # fmt: skip
FAMILIES = (
    GPT2, LLAMA, MISTRAL, QWEN2, QWEN3, PHI3, OLMO2, OLMO3, SMOLLM3, GEMMA2, GEMMA3, GPT_NEOX,
    BLOOM,
)  # fmt: skip

MIXTURE = "a mixture of experts"
RECURRENT = "layers that are recurrent or of linear attention instead of softmax attention"
LATENT = "latent attention (MLA), and a mixture of experts"
# What other types of models have that our GPT does not.
UNSUPPORTED = MappingProxyType(
    {
        **dict.fromkeys(
            ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "flex_olmo", "phimoe", "gpt_oss",
             "dbrx", "granitemoe", "ernie4_5_moe", "glm4_moe", "minimax_m2", "hunyuan_v1_moe",
             "llama4", "llama4_text", "jetmoe", "arctic"),
            MIXTURE,
        ),
        **dict.fromkeys(("deepseek_v2", "deepseek_v3", "kimi_k2", "longcat_flash"), LATENT),
        **dict.fromkeys(
            ("mamba", "mamba2", "falcon_mamba", "rwkv", "rwkv7", "recurrent_gemma", "xlstm"),
            RECURRENT,
        ),
        **dict.fromkeys(
            ("qwen3_next", "jamba", "bamba", "granitemoehybrid", "nemotron_h", "zamba", "zamba2",
             "falcon_h1", "kimi_linear", "minimax", "qwen3_5", "olmo_hybrid"),
            f"{RECURRENT}, in some or all blocks",
        ),
        **dict.fromkeys(
            ("t5", "mt5", "bart", "mbart", "pegasus"), "an encoder beside the decoder"
        ),
        **dict.fromkeys(
            ("bert", "roberta", "deberta-v2", "modernbert"), "attention that is not causal"
        ),
        **dict.fromkeys(
            ("gemma3", "mistral3", "llava", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "mllama",
             "phi4_multimodal", "gemma3n"),
            "an encoder of images or sound beside the language model",
        ),
    }
)  # fmt: skip
