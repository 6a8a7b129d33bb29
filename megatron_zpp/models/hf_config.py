"""Hugging Face's config.json and our ModelConfig, converted in both directions.

One table of settings for each family of models (`model_type`) serves both. A setting that the other
side cannot express is refused with an error that names it.
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

# Hugging Face's name -> the fields of ModelConfig that differ from their defaults.
ACTIVATIONS: Mapping[str, Mapping[str, bool]] = MappingProxyType(
    {
        "gelu_new": {},
        "gelu_pytorch_tanh": {},
        "gelu": {"bias_gelu_fusion": False},
        "relu2": {"squared_relu": True},
    }
)
QUANTIZATION = "quantization_config"
MAX_NUMBER = 2**31  # exclusive; larger than any size of a model
REAL_FIELDS = ("layernorm_epsilon", "init_method_std", "attention_dropout", "hidden_dropout")


@dataclass(frozen=True)
class Setting:
    """A number: its key in config.json, the field of ModelConfig, the default of transformers."""

    key: str
    field: str
    default: float | None


@dataclass(frozen=True, kw_only=True)
class Family:
    """A `model_type`: its settings, and the values that both sides must have.

    `required` maps keys of config.json to the only supported value and to the default of
    transformers. `model_fields` are values of ModelConfig that every model of the family has.
    `activation` is the key and its default; the default None means SwiGLU, named by the key. The
    `bias_keys` must be equal; without any, all linear layers have a bias.
    """

    name: str
    class_name: str
    settings: tuple[Setting, ...]
    required: Mapping[str, tuple[Any, Any]]
    model_fields: Mapping[str, Any]
    activation: tuple[str, str | None]
    bias_keys: tuple[str, ...]
    vocab_size: int
    is_tied: bool
    rotary: rope.RopeKeys | None = None


@dataclass(frozen=True, kw_only=True)
class HuggingFaceConfig:
    """The content of a config.json: the family, our ModelConfig, and the vocabulary's rows."""

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
    required=MappingProxyType(
        {
            "scale_attn_weights": (True, True),
            "scale_attn_by_inverse_layer_idx": (False, False),
            "add_cross_attention": (False, False),
        }
    ),
    model_fields=MappingProxyType(
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
    bias_keys=(),
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
    required=MappingProxyType({}),
    model_fields=MappingProxyType(
        {
            "normalization": "RMSNorm",
            "position_embedding_type": "rope",
            "rotary_percent": 1.0,
            "swiglu": True,
            "apply_residual_connection_post_layernorm": False,
        }
    ),
    activation=("hidden_act", None),
    bias_keys=("attention_bias", "mlp_bias"),
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
        replace(setting, default=MISTRAL_DEFAULTS.get(setting.key, setting.default))
        for setting in LLAMA.settings
    ),
    required=MappingProxyType({"sliding_window": (None, 4096)}),
    model_fields=MappingProxyType({**LLAMA.model_fields, "disable_bias_linear": True}),
    bias_keys=(),
)  # fmt: skip
GPT_NEOX = Family(
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
    required=MappingProxyType(
        {"use_parallel_residual": (False, True), "attention_bias": (True, True)}
    ),
    model_fields=MappingProxyType(
        {**GPT2.model_fields, "position_embedding_type": "rope", "use_rope_scaling": False}
    ),
    activation=("hidden_act", "gelu"),
    bias_keys=(),
    vocab_size=50432,
    is_tied=False,
    rotary=rope.GPT_NEOX,
)
FAMILIES = (GPT2, LLAMA, MISTRAL, GPT_NEOX)
EXPORTED_FAMILIES = (GPT2, LLAMA, GPT_NEOX)  # a Mistral without a window is a Llama


def parse_config(content: Mapping[str, Any], location: str) -> HuggingFaceConfig:
    """Convert the content of a config.json; `location` is named in errors.

    The model's `seq_length` is the largest it supports, and its dropouts are those of the file.
    Raises InputError for an unsupported kind of model, for a setting that our model cannot have,
    and for values of a wrong type.
    """
    family = _family(content, location)
    if content.get(QUANTIZATION):
        raise InputError(
            f"{location}: {QUANTIZATION}: quantized weights are not supported; dequantize them"
        )
    for key, (supported, default) in family.required.items():
        value = content.get(key, default)
        if value != supported:
            raise InputError(f"{location}: {key} is {value!r}; only {supported!r} is supported")
    fields: dict[str, Any] = {
        setting.field: _number(content, setting, location) for setting in family.settings
    }
    fields |= {name: value for name, value in family.model_fields.items() if value is not None}
    fields |= _activation_fields(family, content, location)
    fields |= _bias_fields(family, content, location)
    if family.rotary is not None:
        fields |= rope.read_rope(content, family.rotary, location)
        fields.setdefault("hidden_dropout", 0.0)
    is_tied = content.get("tie_word_embeddings", family.is_tied)
    if not isinstance(is_tied, bool):
        raise InputError(f"{location}: tie_word_embeddings is {is_tied!r}; expected true or false")
    fields["untie_embeddings_and_output_weights"] = not is_tied
    fields["seq_length"] = fields["max_position_embeddings"]
    vocab_size = Setting("vocab_size", "vocab_size", family.vocab_size)
    vocab_rows = _number(content, vocab_size, location)
    try:
        model = ModelConfig(**_without_redundant_values(fields))
        model.check()
    except InputError as error:
        raise InputError(f"{location}: {error}") from error
    return HuggingFaceConfig(family=family, model=model, vocab_rows=vocab_rows)


def family_of(model: ModelConfig) -> Family:
    """Return the family that our model can be exported as.

    Raises InputError, with the settings that rule out each family, if there is none.
    """
    comparable = _comparable(model)
    reasons = []
    for family in EXPORTED_FAMILIES:
        differences = [
            f"{name} is {getattr(comparable, name)}, not {required}"
            for name, required in family.model_fields.items()
            if getattr(comparable, name) != required
        ]
        if not differences:
            return family
        reasons.append(f"  {family.name}: {'; '.join(differences)}")
    raise InputError(
        "the model is of none of the Hugging Face families that are supported:\n"
        + "\n".join(reasons)
    )


def build_config(model: ModelConfig, vocab_rows: int, eod: int) -> dict[str, Any]:
    """Return the content of a config.json for our model; `eod` is the end-of-document id.

    Raises InputError for a model that no supported family can express.
    """
    family = family_of(model)
    content: dict[str, Any] = {"architectures": [family.class_name], "model_type": family.name}
    resolved_fields = {
        "ffn_hidden_size": model.ffn_size,
        "num_query_groups": model.kv_heads,
        "kv_channels": model.head_dim,
        "max_position_embeddings": model.num_positions,
    }
    for setting in family.settings:
        value = resolved_fields.get(setting.field, getattr(model, setting.field))
        content[setting.key] = value
    activation_key, default = family.activation
    content[activation_key] = "silu" if default is None else _activation_name(model)
    for key in family.bias_keys:
        content[key] = not model.disable_bias_linear
    content |= {key: supported for key, (supported, _) in family.required.items()}
    if family.rotary is not None:
        content |= rope.write_rope(model, family.rotary)
    else:
        content["embd_pdrop"] = model.hidden_dropout
    content["tie_word_embeddings"] = not model.untie_embeddings_and_output_weights
    content |= {"vocab_size": vocab_rows, "bos_token_id": eod, "eos_token_id": eod}
    return content


def _family(content: Mapping[str, Any], location: str) -> Family:
    model_type = content.get("model_type")
    class_names = content.get("architectures") or []
    if not isinstance(class_names, list):
        raise InputError(f"{location}: architectures is {class_names!r}; expected a list of names")
    for family in FAMILIES:
        bare_name = re.sub("(ForCausalLM|LMHeadModel)$", "Model", family.class_name)
        has_class = family.class_name in class_names or bare_name in class_names
        if model_type == family.name and (has_class or not class_names):
            return family
    supported = ", ".join(f"{family.name} ({family.class_name})" for family in FAMILIES)
    classes = f" ({', '.join(map(str, class_names))})" if class_names else ""
    raise InputError(
        f"{location}: a model of type {model_type!r}{classes} is not supported; supported are "
        f"{supported}"
    )


def _number(content: Mapping[str, Any], setting: Setting, location: str) -> Any:
    value = content.get(setting.key, setting.default)
    if value is None and setting.default is None:
        return None
    is_real = setting.field in REAL_FIELDS
    types = (int, float) if is_real else (int,)
    is_valid = isinstance(value, types) and not isinstance(value, bool)
    if is_valid:
        is_valid = math.isfinite(value) if is_real else 0 < value < MAX_NUMBER
    if not is_valid:
        expected = "a number" if is_real else "a whole number above 0"
        raise InputError(f"{location}: {setting.key} is {value!r}; expected {expected}")
    return value


def _activation_fields(family: Family, content: Mapping[str, Any], location: str) -> dict[str, Any]:
    key, default = family.activation
    supported = ("silu",) if default is None else tuple(ACTIVATIONS)
    name = content.get(key, default or "silu")
    if name not in supported:
        raise InputError(
            f"{location}: {key} {name!r} is not supported; supported are {', '.join(supported)}"
        )
    return dict(ACTIVATIONS.get(name, {}))


def _activation_name(model: ModelConfig) -> str:
    if model.squared_relu:
        return "relu2"
    if model.openai_gelu or model.bias_gelu_fusion:
        return "gelu_new"
    return "gelu"


def _bias_fields(family: Family, content: Mapping[str, Any], location: str) -> dict[str, Any]:
    if not family.bias_keys:
        return {}
    has_bias = {key: bool(content.get(key, False)) for key in family.bias_keys}
    if len(set(has_bias.values())) > 1:
        values = ", ".join(f"{key} is {value}" for key, value in has_bias.items())
        raise InputError(
            f"{location}: {values}; only a bias in all linear layers or in none is supported"
        )
    return {"disable_bias_linear": not any(has_bias.values())}


def _without_redundant_values(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields with values that restate a default reset, so that equal models compare.

    The width of the MLP, which has several defaults, is filled in instead.
    """
    fields = dict(fields)
    heads, hidden_size = fields["num_attention_heads"], fields["hidden_size"]
    head_dim = fields.get("kv_channels")
    if fields.get("num_query_groups") == heads:
        fields["num_query_groups"] = None
    if head_dim is not None and head_dim * heads == hidden_size:
        fields["kv_channels"] = None
    if fields["ffn_hidden_size"] is None:
        fields["ffn_hidden_size"] = 4 * hidden_size
    return fields


def _comparable(model: ModelConfig) -> ModelConfig:
    names = ("num_attention_heads", "hidden_size", "num_query_groups", "kv_channels")
    fields = {name: getattr(model, name) for name in names} | {"ffn_hidden_size": model.ffn_size}
    return replace(model, **_without_redundant_values(fields))
