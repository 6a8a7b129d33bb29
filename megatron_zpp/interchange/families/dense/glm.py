"""GLM, GLM-4, Helium and ERNIE 4.5: rotary positions turn neighbouring channels."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_zpp.interchange.families.dense.shared import (
    HEAD_WIDTH,
    LLAMA_FIELDS,
    LLAMA_NUMBERS,
    MLP_BIAS,
    QKV_BIAS,
    SWIGLU,
    all_biases,
    llama_numbers,
)
from megatron_zpp.interchange.families.family import Family
from megatron_zpp.interchange.families.rope import Rotary
from megatron_zpp.interchange.families.settings import Number, switch
from megatron_zpp.settings.config import ModelConfig
from zeropp.errors import InputError

INTERLEAVED_FIELDS = {**LLAMA_FIELDS, "rotary_interleaved": True}
GLM_SETTINGS = (
    *LLAMA_NUMBERS,
    SWIGLU,
    switch("attention_bias", True, "add_qkv_bias"),
    Rotary(is_partial=True, default_share=0.5),
)
GLM = Family(
    name="glm",
    class_name="GlmForCausalLM",
    fields=INTERLEAVED_FIELDS,
    settings=GLM_SETTINGS,
)
GLM4 = Family(
    name="glm4",
    class_name="Glm4ForCausalLM",
    fields={**INTERLEAVED_FIELDS, "norm_placement": "sandwich"},
    settings=GLM_SETTINGS,
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
        *llama_numbers(without=(HEAD_WIDTH,)),
        SquareOutput(128),
        SWIGLU,
        QKV_BIAS,
        MLP_BIAS,
        Rotary(default_base=100000.0),
    ),
)
ERNIE4_5 = Family(
    name="ernie4_5",
    class_name="Ernie4_5ForCausalLM",
    fields=INTERLEAVED_FIELDS,
    settings=(
        *llama_numbers(without=("attention_dropout",)),
        SWIGLU,
        all_biases("use_bias", False),
        Rotary(default_base=500000.0),
    ),
)
