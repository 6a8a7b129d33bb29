"""Falcon, StarCoder 2, Nemotron, Apertus, nanochat: rotary positions and an MLP without a gate."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from megatron_zpp.interchange.families.dense.shared import (
    ATTENTION_BIAS,
    HEAD_WIDTH,
    LLAMA_FIELDS,
    LLAMA_NUMBERS,
    MLP_BIAS,
    all_biases,
    llama_numbers,
)
from megatron_zpp.interchange.families.family import Family
from megatron_zpp.interchange.families.layers import Window
from megatron_zpp.interchange.families.rope import Rotary
from megatron_zpp.interchange.families.settings import (
    ACTIVATIONS,
    Choice,
    Number,
    activation,
    never,
)
from megatron_zpp.settings.config import ModelConfig
from zeropp.errors import InputError

FALCON_SETTINGS = (
    *llama_numbers(
        without=(HEAD_WIDTH, "intermediate_size", "num_key_value_heads"),
        epsilon="layer_norm_epsilon",
    ),
    Number("ffn_hidden_size", "ffn_hidden_size", None),
    Number("hidden_dropout", "hidden_dropout", 0.0),
    activation("activation", "gelu", ACTIVATIONS),
    all_biases("bias", False),
    never("alibi"),
    Rotary(),
)


@dataclass(frozen=True)
class MultiQuery:
    """All query heads share one key-value head, unless `multi_query` is false."""

    def read(self, content: Mapping[str, Any], location: str) -> dict[str, Any]:
        is_shared = content.get("multi_query", True)
        if not isinstance(is_shared, bool):
            raise InputError(f"{location}: multi_query is {is_shared!r}; expected true or false")
        return {"num_query_groups": 1 if is_shared else None}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        return {"multi_query": model.kv_heads == 1}


PARALLEL = "use_parallel_residual"
NORMS = "num_ln_in_parallel_attn"
SINGLE_NORM = "parallel_residual_single_norm"
FALCON_NEW = Family(  # Falcon-40B and 180B
    name="falcon",
    class_name="FalconForCausalLM",
    marks={"new_decoder_architecture": (True,), NORMS: (None, 2)},
    names_of="falcon_new",
    fields={PARALLEL: True},
    settings=(
        *FALCON_SETTINGS,
        Number("num_kv_heads", "num_query_groups", None),
        Choice("new_decoder_architecture", True, {True: {}}),
        Choice(NORMS, 2, {None: {}, 2: {}}),
    ),
)
FALCON2 = replace(  # Falcon 2 11B
    FALCON_NEW,
    marks={"new_decoder_architecture": (True,)},
    names_of="falcon",
    fields={PARALLEL: True, SINGLE_NORM: True},
    settings=(*FALCON_NEW.settings[:-1], Choice(NORMS, 1, {1: {}})),
)
FALCON = replace(  # Falcon-7B and RW
    FALCON_NEW,
    marks={},
    names_of="falcon",
    fields={},
    settings=(
        *FALCON_SETTINGS,
        never("new_decoder_architecture"),
        Choice(NORMS, None, {None: {}, 1: {}}),
        Choice(
            "parallel_attn",
            True,
            {value: {PARALLEL: value, SINGLE_NORM: value} for value in (True, False)},
        ),
        MultiQuery(),
    ),
)
STARCODER2 = Family(
    name="starcoder2",
    class_name="Starcoder2ForCausalLM",
    fields={},
    settings=(
        *llama_numbers(epsilon="norm_epsilon"),
        Number("residual_dropout", "hidden_dropout", 0.0, copies=("embedding_dropout",)),
        activation("hidden_act", "gelu_pytorch_tanh", ACTIVATIONS),
        all_biases("use_bias", True),
        Rotary(),
        Window(default=None),
    ),
)
NEMOTRON = Family(
    name="nemotron",
    class_name="NemotronForCausalLM",
    fields={"hidden_dropout": 0.0, "disable_bias_linear": True, "apply_layernorm_1p": True},
    settings=(
        *llama_numbers(epsilon="norm_eps"),
        activation("hidden_act", "relu2", ACTIVATIONS),
        ATTENTION_BIAS,
        MLP_BIAS,
        Rotary(is_partial=True, default_share=0.5),
    ),
)
APERTUS = Family(
    name="apertus",
    class_name="ApertusForCausalLM",
    fields={**LLAMA_FIELDS, "qk_layernorm": True},
    settings=(
        *LLAMA_NUMBERS,
        activation("hidden_act", "xielu", {**ACTIVATIONS, "xielu": {"xielu": True}}),
        ATTENTION_BIAS,
        Rotary(default_base=12000000.0),
    ),
)
NANOCHAT = Family(
    name="nanochat",
    class_name="NanoChatForCausalLM",
    fields={
        **LLAMA_FIELDS,
        "disable_norm_gain": True,
        "embed_layernorm": True,
        "qk_layernorm": True,
    },
    settings=(
        *LLAMA_NUMBERS,
        activation("hidden_act", "relu2", ACTIVATIONS),
        ATTENTION_BIAS,
        Number("final_logit_softcapping", "final_logit_softcapping", 15.0, may_be_none=True),
        Rotary(),
    ),
)
