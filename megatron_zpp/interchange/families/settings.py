"""The settings of which a family's config.json consists, each a class, composed in the table."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from megatron_zpp.settings.config import ModelConfig
from zeropp.errors import InputError

MAX_NUMBER = 2**31  # exclusive; larger than any size of a model
REAL_FIELDS = (
    "layernorm_epsilon", "init_method_std", "attention_dropout", "hidden_dropout",
    "query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping",
)  # fmt: skip
Activations = Mapping[str, Mapping[str, bool]]

TANH_GELUS = (  # names of one function
    "gelu_pytorch_tanh", "gelu_new", "gelu_fast", "gelu_accurate", "gelu_python_tanh",
)  # fmt: skip
EXACT_GELUS = ("gelu", "gelu_python")
# Hugging Face's name -> the fields of ModelConfig that differ from their defaults. Of several names
# the first is written.
ACTIVATIONS: Activations = MappingProxyType(
    {
        "gelu_new": {},
        **dict.fromkeys(TANH_GELUS, {}),
        **dict.fromkeys(EXACT_GELUS, {"bias_gelu_fusion": False}),
        "relu": {"relu": True},
        "relu2": {"squared_relu": True},
    }
)
GATED_ACTIVATIONS: Activations = MappingProxyType(
    {
        **dict.fromkeys(("silu", "swish"), {"swiglu": True}),
        **dict.fromkeys(TANH_GELUS, {"geglu": True}),
        **dict.fromkeys(EXACT_GELUS, {"geglu": True, "bias_gelu_fusion": False}),
        "relu": {"reglu": True},
    }
)
ACTIVATION_FIELDS = ("swiglu", "geglu", "reglu", "relu", "squared_relu", "bias_gelu_fusion")


@dataclass(frozen=True)
class Number:
    """A number: its key in config.json, the field of ModelConfig, the default of transformers.

    None is a value where the default is None, and where it `may_be_none`. `old_keys` are read too.
    """

    key: str
    field: str
    default: float | None
    old_keys: tuple[str, ...] = ()
    may_be_none: bool = False

    def read(self, content: Mapping[str, Any], location: str) -> dict[str, Any]:
        return {self.field: self.value(content, location)}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        resolved_fields = {
            "ffn_hidden_size": model.ffn_size,
            "num_query_groups": model.kv_heads,
            "kv_channels": model.head_dim,
            "max_position_embeddings": model.num_positions,
            "query_pre_attn_scalar": model.score_scalar,
        }
        value = resolved_fields.get(self.field, getattr(model, self.field))
        is_whole = isinstance(self.default, int) and value is not None and value % 1 == 0
        return {self.key: int(value) if is_whole else value}

    def value(self, content: Mapping[str, Any], location: str) -> Any:
        """Return the number in `content`, or the default."""
        key = next((key for key in (self.key, *self.old_keys) if key in content), self.key)
        value = content.get(key, self.default)
        if value is None and (self.default is None or self.may_be_none):
            return None
        is_real = self.field in REAL_FIELDS
        types = (int, float) if is_real else (int,)
        is_valid = isinstance(value, types) and not isinstance(value, bool)
        if is_valid:
            is_valid = math.isfinite(value) if is_real else 0 < value < MAX_NUMBER
        if not is_valid:
            expected = "a number" if is_real else "a whole number above 0"
            raise InputError(f"{location}: {key} is {value!r}; expected {expected}")
        return value


@dataclass(frozen=True)
class Switch:
    """A key that is true or false, the field of ModelConfig, the default of transformers."""

    key: str
    field: str
    default: bool

    def read(self, content: Mapping[str, Any], location: str) -> dict[str, Any]:
        return {self.field: _truth(content, self.key, self.default, location)}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        return {self.key: getattr(model, self.field)}


@dataclass(frozen=True)
class Copy:
    """A key that repeats a field which another key sets."""

    key: str
    field: str

    def read(self, content: Mapping[str, Any], location: str) -> dict[str, Any]:
        return {}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        return {self.key: getattr(model, self.field)}


@dataclass(frozen=True)
class Only:
    """A key with the only supported value, and the default of transformers; null is false."""

    key: str
    supported: Any
    default: Any

    def read(self, content: Mapping[str, Any], location: str) -> dict[str, Any]:
        value = content.get(self.key, self.default)
        if value != self.supported and (value or self.supported):
            raise InputError(
                f"{location}: {self.key} is {value!r}; only {self.supported!r} is supported"
            )
        return {}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        return {self.key: self.supported}


@dataclass(frozen=True)
class Always:
    """Fields of ModelConfig that every model of the family has, without a key."""

    fields: Mapping[str, Any]

    def read(self, content: Mapping[str, Any], location: str) -> dict[str, Any]:
        return dict(self.fields)

    def write(self, model: ModelConfig) -> dict[str, Any]:
        return {}


@dataclass(frozen=True)
class Activation:
    """The nonlinearity of the MLP: its key, the default of transformers, the supported names."""

    key: str
    default: str
    names: Activations

    def read(self, content: Mapping[str, Any], location: str) -> dict[str, Any]:
        name = content.get(self.key, self.default)
        if name not in self.names:
            raise InputError(
                f"{location}: {self.key} {name!r} is not supported; supported are "
                f"{', '.join(self.names)}"
            )
        return dict(self.names[name])

    def write(self, model: ModelConfig) -> dict[str, Any]:
        defaults = {field: getattr(ModelConfig(), field) for field in ACTIVATION_FIELDS}
        for name, fields in self.names.items():
            expected = defaults | fields
            if all(getattr(model, field) == expected[field] for field in ACTIVATION_FIELDS):
                return {self.key: name}
        return {}


@dataclass(frozen=True)
class AttentionBias:
    """A key that is true if queries, keys, values and the layer behind attention have biases."""

    key: str = "attention_bias"
    default: bool = False

    def read(self, content: Mapping[str, Any], location: str) -> dict[str, Any]:
        has_bias = _truth(content, self.key, self.default, location)
        return {"add_qkv_bias": has_bias, "add_attention_output_bias": has_bias}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        return {self.key: model.has_attention_output_bias}


@dataclass(frozen=True)
class AddedBias:
    """A key that is true if a part of a model without biases has them, and the part's field."""

    key: str
    field: str

    def read(self, content: Mapping[str, Any], location: str) -> dict[str, Any]:
        return {self.field: _truth(content, self.key, False, location)}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        return {self.key: getattr(model, self.field) or not model.disable_bias_linear}


@dataclass(frozen=True)
class ScaledScores:
    """A key that is false if the products of queries and keys are not divided."""

    key: str

    def read(self, content: Mapping[str, Any], location: str) -> dict[str, Any]:
        is_scaled = _truth(content, self.key, True, location)
        return {"query_pre_attn_scalar": None if is_scaled else 1.0}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        return {self.key: model.score_scalar != 1.0}


def _truth(content: Mapping[str, Any], key: str, default: bool, location: str) -> bool:
    """Return what a key says, null as the default; raises InputError if it is not true or false."""
    value = content.get(key)
    value = default if value is None else value
    if not isinstance(value, bool):
        raise InputError(f"{location}: {key} is {value!r}; expected true or false")
    return value
