"""GLM, GLM-4, Helium and ERNIE 4.5: rotary positions turn neighbouring channels."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_zpp.interchange.families.dense.shared import (
    HEAD_WIDTH,
    LLAMA_FIELDS,
    MLP_BIAS,
    QKV_BIAS,
    SWIGLU,
    all_biases,
    llama_numbers,
)
from megatron_zpp.interchange.families.family import Family
from megatron_zpp.interchange.families.forms import FIRST_HALF, SECOND_HALF
from megatron_zpp.interchange.families.names import (
    LLAMA,
    LLAMA_BLOCK,
    NameRow,
    block_rows,
    llama_with,
)
from megatron_zpp.interchange.families.rope import Rotary
from megatron_zpp.interchange.families.settings import Number, switch
from megatron_zpp.settings.config import ModelConfig
from zeropp.errors import InputError

INTERLEAVED_FIELDS = {**LLAMA_FIELDS, "rotary_interleaved": True}
GATE_UP = (
    NameRow("blocks.{}.mlp.gate", (LLAMA_BLOCK + "mlp.gate_up_proj",), FIRST_HALF),
    NameRow("blocks.{}.mlp.input", (LLAMA_BLOCK + "mlp.gate_up_proj",), SECOND_HALF),
)
GLM_SETTINGS = (
    *llama_numbers(
        num_hidden_layers=40,
        num_key_value_heads=2,
        head_dim=128,
        intermediate_size=13696,
        max_position_embeddings=131072,
        rms_norm_eps=1.5625e-7,
    ),
    SWIGLU,
    switch("attention_bias", True, "add_qkv_bias"),
    Rotary(is_partial=True, default_share=0.5),
)
GLM = Family(
    name="glm",
    class_name="GlmForCausalLM",
    fields=INTERLEAVED_FIELDS,
    settings=GLM_SETTINGS,
    names=llama_with(*GATE_UP),
    vocab_size=151552,
)
GLM4 = Family(
    name="glm4",
    class_name="Glm4ForCausalLM",
    fields={**INTERLEAVED_FIELDS, "norm_placement": "sandwich"},
    settings=GLM_SETTINGS,
    names=llama_with(
        *GATE_UP,
        *block_rows({"post_norm1": "post_self_attn_layernorm", "post_norm2": "post_mlp_layernorm"}),
    ),
    vocab_size=151552,
)


@dataclass(frozen=True)
class SquareOutput:
    """The width of a head, which all heads together make the width of the model."""

    default: int

    def read(self, content: Mapping[str, Any], location: str) -> dict[str, Any]:
        width = Number(HEAD_WIDTH, "kv_channels", self.default).value(content, location)
        heads, hidden = (
            Number(key, key, default).value(content, location)
            for key, default in (("num_attention_heads", 20), ("hidden_size", 2560))
        )
        if width * heads != hidden:
            raise InputError(
                f"{location}: {heads} heads of {width} channels do not make hidden_size {hidden}"
            )
        return {"kv_channels": width}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        return {HEAD_WIDTH: model.head_dim}


HELIUM = Family(
    name="helium",
    class_name="HeliumForCausalLM",
    fields=INTERLEAVED_FIELDS,
    settings=(
        *llama_numbers(
            without=(HEAD_WIDTH,),
            num_hidden_layers=24,
            hidden_size=2560,
            num_attention_heads=20,
            num_key_value_heads=20,
            intermediate_size=7040,
            max_position_embeddings=4096,
            rms_norm_eps=1e-8,
        ),
        SquareOutput(128),
        SWIGLU,
        QKV_BIAS,
        MLP_BIAS,
        Rotary(default_base=100000.0),
    ),
    names=LLAMA,
    vocab_size=48000,
)
ERNIE4_5 = Family(
    name="ernie4_5",
    class_name="Ernie4_5ForCausalLM",
    fields=INTERLEAVED_FIELDS,
    settings=(
        *llama_numbers(
            without=("attention_dropout",),
            num_hidden_layers=18,
            hidden_size=1024,
            num_attention_heads=16,
            num_key_value_heads=2,
            head_dim=128,
            intermediate_size=3072,
            max_position_embeddings=131072,
            rms_norm_eps=1e-5,
        ),
        SWIGLU,
        all_biases("use_bias", False),
        Rotary(default_base=500000.0),
    ),
    names=LLAMA,
    vocab_size=103424,
    is_tied=True,
)
