"""Llama, and what differs in a few settings: InternLM3, SmolLM3, Granite, Phi-3, HunYuan."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_zpp.interchange.families.dense.shared import (
    ATTENTION_BIAS,
    GRANITE_MULTIPLIERS,
    LLAMA_FIELDS,
    LLAMA_NUMBERS,
    MLP_BIAS,
    SWIGLU,
)
from megatron_zpp.interchange.families.family import Family
from megatron_zpp.interchange.families.layers import LayersWithoutRope, Window
from megatron_zpp.interchange.families.rope import (
    LONGROPE,
    Rotary,
    checked_base,
    is_number,
    json_object,
)
from megatron_zpp.interchange.families.settings import Number
from megatron_zpp.settings.config import ModelConfig
from zeropp.errors import InputError

LLAMA = Family(
    name="llama",
    class_name="LlamaForCausalLM",
    fields=LLAMA_FIELDS,
    settings=(*LLAMA_NUMBERS, SWIGLU, ATTENTION_BIAS, MLP_BIAS, Rotary()),
)


@dataclass(frozen=True)
class OneBias:
    """Two keys, of which both or none are true: all linear layers have biases, or none has."""

    def read(self, content: Mapping[str, Any], location: str) -> dict[str, Any]:
        qkv, others = (
            bool(content.get(key, content.get(own_key, False)))
            for key, own_key in (("qkv_bias", "attention_bias"), ("bias", "mlp_bias"))
        )
        if qkv != others:
            raise InputError(
                f"{location}: qkv_bias is {qkv} and bias is {others}; only equal values are "
                "supported"
            )
        return {"disable_bias_linear": not qkv}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        return dict.fromkeys(("qkv_bias", "bias"), not model.disable_bias_linear)


INTERNLM3 = Family(  # a Llama by another name
    name="internlm3",
    class_name="LlamaForCausalLM",
    other_class_names=("InternLM3ForCausalLM",),
    fields=LLAMA_FIELDS,
    settings=(*LLAMA_NUMBERS, SWIGLU, OneBias(), Rotary()),
)
SMOLLM3 = Family(
    name="smollm3",
    class_name="SmolLM3ForCausalLM",
    fields=LLAMA_FIELDS,
    settings=(
        *LLAMA_NUMBERS,
        SWIGLU,
        Rotary(default_base=2000000.0),
        LayersWithoutRope(4),
        Window(default=None, switch="use_sliding_window", has_types=True),
        ATTENTION_BIAS,
        MLP_BIAS,
    ),
)
GRANITE = Family(
    name="granite",
    class_name="GraniteForCausalLM",
    fields=LLAMA_FIELDS,
    settings=(*LLAMA_NUMBERS, SWIGLU, ATTENTION_BIAS, MLP_BIAS, Rotary(), *GRANITE_MULTIPLIERS),
)
PHI3 = Family(
    name="phi3",
    class_name="Phi3ForCausalLM",
    fields=LLAMA_FIELDS,
    settings=(
        *LLAMA_NUMBERS,
        SWIGLU,
        Number("resid_pdrop", "hidden_dropout", 0.0, copies=("embd_pdrop",)),
        Rotary(is_partial=True, rope_types=("default", *LONGROPE), writes_longrope=True),
        Window(default=None),
    ),
)


@dataclass(frozen=True, kw_only=True)
class AlphaRotary(Rotary):
    """Rotary positions whose base `alpha` stretches where the scaling has it: base α^(D / (D - 2)).

    The base that results is written as any other.
    """

    def read(self, content: Mapping[str, Any], location: str) -> dict[str, Any]:
        fields = super().read(content, location)
        scaling = json_object(content, "rope_scaling", location)
        scaling = scaling or json_object(content, "rope_parameters", location)
        alpha = scaling.get("alpha")
        if not alpha or scaling.get("rope_type", scaling.get("type")) != "dynamic":
            return fields
        width = content.get("head_dim")
        is_valid = is_number(alpha) and 0 < alpha < 1e12 and isinstance(width, int) and width > 2
        if not is_valid:
            raise InputError(
                f"{location}: alpha of the rotary positions is {alpha!r} and head_dim {width!r}; "
                "expected a number above 0, and a whole number above 2"
            )
        base = fields["rotary_base"] * alpha ** (width / (width - 2))
        return fields | {"rotary_base": checked_base(base, location)}


HUNYUAN = Family(
    name="hunyuan_v1_dense",
    class_name="HunYuanDenseV1ForCausalLM",
    fields={**LLAMA_FIELDS, "qk_layernorm": True, "qk_layernorm_after_rope": True},
    settings=(*LLAMA_NUMBERS, SWIGLU, ATTENTION_BIAS, AlphaRotary()),
)
