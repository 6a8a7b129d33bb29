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

# Hugging Face's name -> the fields of ModelConfig that differ from their defaults.
ACTIVATIONS: Activations = MappingProxyType(
    {
        "gelu_new": {},
        "gelu_pytorch_tanh": {},
        "gelu": {"bias_gelu_fusion": False},
        "relu2": {"squared_relu": True},
    }
)
SWIGLU: Activations = MappingProxyType({"silu": {"swiglu": True}})
GEGLU: Activations = MappingProxyType(
    {
        "gelu_pytorch_tanh": {"geglu": True},
        "gelu": {"geglu": True, "bias_gelu_fusion": False},
    }
)
ACTIVATION_FIELDS = ("swiglu", "geglu", "squared_relu", "bias_gelu_fusion")


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
        value = content.get(self.key, self.default)
        if not isinstance(value, bool):
            raise InputError(f"{location}: {self.key} is {value!r}; expected true or false")
        return {self.field: value}

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
class Biases:
    """Keys that must be equal, as all linear layers have a bias or none has."""

    keys: tuple[str, ...]

    def read(self, content: Mapping[str, Any], location: str) -> dict[str, Any]:
        has_bias = {key: bool(content.get(key, False)) for key in self.keys}
        if len(set(has_bias.values())) > 1:
            values = ", ".join(f"{key} is {value}" for key, value in has_bias.items())
            raise InputError(
                f"{location}: {values}; only a bias in all linear layers or in none is supported"
            )
        return {"disable_bias_linear": not any(has_bias.values())}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        return dict.fromkeys(self.keys, not model.disable_bias_linear)
