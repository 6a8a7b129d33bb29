"""Hugging Face's config.json and our ModelConfig: one table of settings, read in both directions.

What a model there has and ours cannot do is refused by name, and so is the reverse.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from megatron_zpp.models import hf_rope as rope
from megatron_zpp.settings.config import ModelConfig
from zeropp.errors import InputError

# Theirs -> our switches; what is left out is as in ModelConfig.
ACTIVATIONS: Mapping[str, Mapping[str, bool]] = MappingProxyType(
    {
        "gelu_new": {},
        "gelu_pytorch_tanh": {},
        "gelu": {"bias_gelu_fusion": False},
        "relu2": {"squared_relu": True},
    }
)
QUANTIZED = "quantization_config"
MOST = 2**31  # no size of a model is as large


@dataclass(frozen=True)
class Setting:
    """A number of theirs, the field of ours, and what theirs is where it is not written."""

    theirs: str
    ours: str
    default: float | None


@dataclass(frozen=True, kw_only=True)
class Family:
    """A `model_type`: its settings; what else it must be; and what ours must be to be one."""

    name: str
    class_name: str
    settings: tuple[Setting, ...]
    theirs: Mapping[str, tuple[Any, Any]]  # key -> what it must be, what it is if not written
    ours: Mapping[str, Any]
    activation: tuple[str, str | None]  # key and default; None: SwiGLU under this key
    biases: tuple[str, ...]  # keys that must agree; none: all layers have a bias
    vocab_size: int
    is_tied: bool
    rotary: rope.Keys | None = None


@dataclass(frozen=True, kw_only=True)
class Described:
    """What a config.json says: the family, our model, and the rows of its vocabulary."""

    family: Family
    model: ModelConfig
    vocab_rows: int


GPT2 = Family(
    name="gpt2",
    class_name="GPT2LMHeadModel",
    settings=(
        Setting("n_layer", "num_layers", 12),
        Setting("n_embd", "hidden_size", 768),
        Setting("n_head", "num_attention_heads", 12),
        Setting("n_inner", "ffn_hidden_size", None),
        Setting("n_positions", "max_position_embeddings", 1024),
        Setting("layer_norm_epsilon", "layernorm_epsilon", 1e-5),
        Setting("initializer_range", "init_method_std", 0.02),
        Setting("attn_pdrop", "attention_dropout", 0.1),
        Setting("resid_pdrop", "hidden_dropout", 0.1),
    ),
    theirs=MappingProxyType(
        {
            "scale_attn_weights": (True, True),
            "scale_attn_by_inverse_layer_idx": (False, False),
            "add_cross_attention": (False, False),
        }
    ),
    ours=MappingProxyType(
        {
            "normalization": "LayerNorm",
            "position_embedding_type": "learned_absolute",
            "swiglu": False,
            "disable_bias_linear": False,
            "num_query_groups": None,
            "kv_channels": None,
            "apply_residual_connection_post_layernorm": False,
        }
    ),
    activation=("activation_function", "gelu_new"),
    biases=(),
    vocab_size=50257,
    is_tied=True,
)
LLAMA = Family(
    name="llama",
    class_name="LlamaForCausalLM",
    settings=(
        Setting("num_hidden_layers", "num_layers", 32),
        Setting("hidden_size", "hidden_size", 4096),
        Setting("num_attention_heads", "num_attention_heads", 32),
        Setting("num_key_value_heads", "num_query_groups", None),
        Setting("head_dim", "kv_channels", None),
        Setting("intermediate_size", "ffn_hidden_size", 11008),
        Setting("max_position_embeddings", "max_position_embeddings", 2048),
        Setting("rms_norm_eps", "layernorm_epsilon", 1e-6),
        Setting("initializer_range", "init_method_std", 0.02),
        Setting("attention_dropout", "attention_dropout", 0.0),
    ),
    theirs=MappingProxyType({}),
    ours=MappingProxyType(
        {
            "normalization": "RMSNorm",
            "position_embedding_type": "rope",
            "rotary_percent": 1.0,
            "swiglu": True,
            "apply_residual_connection_post_layernorm": False,
        }
    ),
    activation=("hidden_act", None),
    biases=("attention_bias", "mlp_bias"),
    vocab_size=32000,
    is_tied=False,
    rotary=rope.LLAMA,
)
MISTRAL_DEFAULTS = MappingProxyType(
    {
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "max_position_embeddings": 131072,
    }
)
MISTRAL = replace(
    LLAMA,
    name="mistral",
    class_name="MistralForCausalLM",
    settings=tuple(
        replace(setting, default=MISTRAL_DEFAULTS.get(setting.theirs, setting.default))
        for setting in LLAMA.settings
    ),
    theirs=MappingProxyType({"sliding_window": (None, 4096)}),
    ours=MappingProxyType({**LLAMA.ours, "disable_bias_linear": True}),
    biases=(),
)  # fmt: skip
NEOX = Family(
    name="gpt_neox",
    class_name="GPTNeoXForCausalLM",
    settings=(
        Setting("num_hidden_layers", "num_layers", 44),
        Setting("hidden_size", "hidden_size", 6144),
        Setting("num_attention_heads", "num_attention_heads", 64),
        Setting("intermediate_size", "ffn_hidden_size", 24576),
        Setting("max_position_embeddings", "max_position_embeddings", 2048),
        Setting("layer_norm_eps", "layernorm_epsilon", 1e-5),
        Setting("initializer_range", "init_method_std", 0.02),
        Setting("attention_dropout", "attention_dropout", 0.0),
        Setting("hidden_dropout", "hidden_dropout", 0.0),
    ),
    theirs=MappingProxyType(
        {"use_parallel_residual": (False, True), "attention_bias": (True, True)}
    ),
    ours=MappingProxyType(
        {**GPT2.ours, "position_embedding_type": "rope", "use_rope_scaling": False}
    ),
    activation=("hidden_act", "gelu"),
    biases=(),
    vocab_size=50432,
    is_tied=False,
    rotary=rope.NEOX,
)
FAMILIES = (GPT2, LLAMA, MISTRAL, NEOX)
WRITTEN = (GPT2, LLAMA, NEOX)  # a Mistral without a window is a Llama


def read_settings(content: Mapping[str, Any], place: str) -> Described:
    """What a config.json's `content` describes; `place` is named in errors.

    The model's `seq_length` is the longest there is, and its dropouts are those of the file. Raises
    InputError for another kind of model, for a setting that our model cannot have, and for numbers
    that are none.
    """
    family = _family(content, place)
    if content.get(QUANTIZED):
        raise InputError(f"{place}: {QUANTIZED}: weights of few bits are not read; dequantize them")
    for key, (only, default) in family.theirs.items():
        if content.get(key, default) != only:
            given = content.get(key, default)
            raise InputError(f"{place}: {key} is {given!r}; only {only!r} is known here")
    values: dict[str, Any] = {
        setting.ours: _number(content, setting, place) for setting in family.settings
    }
    values |= {key: value for key, value in family.ours.items() if value is not None}
    values |= _activation(family, content, place)
    values |= _biases(family, content, place)
    if family.rotary is not None:
        values |= rope.read_rope(content, family.rotary, place)
        values.setdefault("hidden_dropout", 0.0)
    tied = content.get("tie_word_embeddings", family.is_tied)
    if not isinstance(tied, bool):
        raise InputError(f"{place}: tie_word_embeddings is {tied!r}; expected true or false")
    values["untie_embeddings_and_output_weights"] = not tied
    values["seq_length"] = values["max_position_embeddings"]
    rows = _number(content, Setting("vocab_size", "vocab_size", family.vocab_size), place)
    try:
        model = ModelConfig(**_plain(values))
        model.check()
    except InputError as error:
        raise InputError(f"{place}: {error}") from error
    return Described(family=family, model=model, vocab_rows=rows)


def family_of(model: ModelConfig) -> Family:
    """The family that a model of ours can be written as; InputError says what stands against it."""
    plain, reasons = _unneeded_left_out(model), []
    for family in WRITTEN:
        against = [
            f"{name} is {getattr(plain, name)}, not {wanted}"
            for name, wanted in family.ours.items()
            if getattr(plain, name) != wanted
        ]
        if not against:
            return family
        reasons.append(f"  {family.name}: {'; '.join(against)}")
    raise InputError(
        "no model of Hugging Face's that is known here is like this one:\n" + "\n".join(reasons)
    )


def write_settings(model: ModelConfig, vocab_rows: int, end: int) -> dict[str, Any]:
    """The content of a config.json for a model of ours; `end` is the id that ends a document.

    Raises InputError for a model that no known family can be.
    """
    family = family_of(model)
    content: dict[str, Any] = {"architectures": [family.class_name], "model_type": family.name}
    known = {
        "ffn_hidden_size": model.ffn_size,
        "num_query_groups": model.kv_heads,
        "kv_channels": model.head_dim,
        "max_position_embeddings": model.num_positions,
    }
    for setting in family.settings:
        content[setting.theirs] = known.get(setting.ours, getattr(model, setting.ours))
    key, default = family.activation
    content[key] = "silu" if default is None else _activation_name(model)
    for key in family.biases:
        content[key] = not model.disable_bias_linear
    content |= {key: only for key, (only, _) in family.theirs.items()}
    if family.rotary is not None:
        content |= rope.write_rope(model, family.rotary)
    else:
        content["embd_pdrop"] = model.hidden_dropout
    content["tie_word_embeddings"] = not model.untie_embeddings_and_output_weights
    content |= {"vocab_size": vocab_rows, "bos_token_id": end, "eos_token_id": end}
    return content


def _family(content: Mapping[str, Any], place: str) -> Family:
    named = content.get("model_type")
    classes = content.get("architectures") or []
    if not isinstance(classes, list):
        raise InputError(f"{place}: architectures is {classes!r}; expected a list of names")
    for family in FAMILIES:
        bare = re.sub("(ForCausalLM|LMHeadModel)$", "Model", family.class_name)
        is_one = not classes or family.class_name in classes or bare in classes
        if named == family.name and is_one:
            return family
    known = ", ".join(f"{family.name} ({family.class_name})" for family in FAMILIES)
    what = f"{named!r}" + (f" ({', '.join(map(str, classes))})" if classes else "")
    raise InputError(f"{place}: a model of type {what} is not known here; known are {known}")


def _number(content: Mapping[str, Any], one: Setting, place: str) -> Any:
    value = content.get(one.theirs, one.default)
    is_whole = one.ours not in (
        "layernorm_epsilon", "init_method_std", "attention_dropout", "hidden_dropout",
    )  # fmt: skip
    if value is None and one.default is None:
        return None
    kinds = (int,) if is_whole else (int, float)
    is_number = isinstance(value, kinds) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or (is_whole and not 0 < value < MOST):
        expected = "a whole number above 0" if is_whole else "a number"
        raise InputError(f"{place}: {one.theirs} is {value!r}; expected {expected}")
    return value


def _activation(family: Family, content: Mapping[str, Any], place: str) -> dict[str, Any]:
    key, default = family.activation
    name = content.get(key, default or "silu")
    known = ("silu",) if default is None else tuple(ACTIVATIONS)
    if name not in known:
        raise InputError(f"{place}: {key} {name!r} is not known here; known are {', '.join(known)}")
    return dict(ACTIVATIONS.get(name, {}))


def _activation_name(model: ModelConfig) -> str:
    if model.squared_relu:
        return "relu2"
    return "gelu_new" if model.openai_gelu or model.bias_gelu_fusion else "gelu"


def _biases(family: Family, content: Mapping[str, Any], place: str) -> dict[str, Any]:
    said = {key: bool(content.get(key, False)) for key in family.biases}
    if len(set(said.values())) > 1:
        shown = ", ".join(f"{key} is {value}" for key, value in said.items())
        raise InputError(f"{place}: {shown}; here all linear layers have a bias or none has")
    return {"disable_bias_linear": not any(said.values())} if said else {}


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    """Settings without those that say what holds anyway, so that equal models compare equal."""
    heads, hidden = values["num_attention_heads"], values["hidden_size"]
    if values.get("num_query_groups") == heads:
        values["num_query_groups"] = None
    if values.get("kv_channels") is not None and values["kv_channels"] * heads == hidden:
        values["kv_channels"] = None
    if values["ffn_hidden_size"] is None:
        values["ffn_hidden_size"] = 4 * hidden
    return values


def _unneeded_left_out(model: ModelConfig) -> ModelConfig:
    shape = ("num_attention_heads", "hidden_size", "num_query_groups", "kv_channels")
    values = {name: getattr(model, name) for name in shape} | {"ffn_hidden_size": model.ffn_size}
    return replace(model, **_plain(values))
