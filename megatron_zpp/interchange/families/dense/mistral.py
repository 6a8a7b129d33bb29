"""Mistral, Ministral and Ministral 3: Llamas with windows, or with queries scaled by position."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_zpp.interchange.families.dense.shared import LLAMA_FIELDS, LLAMA_NUMBERS, SWIGLU
from megatron_zpp.interchange.families.family import Family
from megatron_zpp.interchange.families.layers import Window
from megatron_zpp.interchange.families.rope import Rotary, is_number
from megatron_zpp.settings.config import ModelConfig
from zeropp.errors import InputError

MISTRAL = Family(
    name="mistral",
    class_name="MistralForCausalLM",
    fields=LLAMA_FIELDS,
    settings=(*LLAMA_NUMBERS, SWIGLU, Rotary(), Window(default=4096)),
)
MINISTRAL = Family(
    name="ministral",
    class_name="MinistralForCausalLM",
    fields=LLAMA_FIELDS,
    settings=(*LLAMA_NUMBERS, SWIGLU, Rotary(), Window(default=4096, has_types=True)),
)


@dataclass(frozen=True, kw_only=True)
class QueryScaleRotary(Rotary):
    """Rotary positions of Ministral 3, which also scale queries: `llama_4_scaling_beta`."""

    rope_types: tuple[str, ...] = ("yarn",)

    def _read_scaling(
        self, scaling: Mapping[str, Any], content: Mapping[str, Any], location: str
    ) -> dict[str, Any]:
        fields = super()._read_scaling(scaling, content, location)
        beta = scaling.get("llama_4_scaling_beta")
        if not is_number(beta) or beta <= 0:
            raise InputError(
                f"{location}: llama_4_scaling_beta is {beta!r}; expected a number above 0"
            )
        return fields | {"llama_4_scaling_beta": float(beta)}

    def _written_scaling(self, model: ModelConfig) -> dict[str, Any]:
        scaling = super()._written_scaling(model)
        return {**scaling, "llama_4_scaling_beta": model.llama_4_scaling_beta}


MINISTRAL3 = Family(
    name="ministral3",
    class_name="Ministral3ForCausalLM",
    fields=LLAMA_FIELDS,
    settings=(
        *LLAMA_NUMBERS,
        SWIGLU,
        QueryScaleRotary(default_base=1000000.0),
        Window(default=None),
    ),
)
