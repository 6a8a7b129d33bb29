"""The settings that a family's config.json consists of: numbers, and keys with a few values."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from megatron_zpp.settings.config import ModelConfig
from zeropp.errors import InputError
from zeropp.settings import read_toml, settings_of

MAX_NUMBER = 2**31  # exclusive; larger than any size of a model
REAL_FIELDS = frozenset(entry.name for entry in settings_of(ModelConfig) if entry.type is float)
# Fields of ModelConfig that do not say all by themselves, and its properties that do.
PROPERTIES: Mapping[str, str] = MappingProxyType(
    {
        "ffn_hidden_size": "ffn_size",
        "num_query_groups": "kv_heads",
        "kv_channels": "head_dim",
        "max_position_embeddings": "num_positions",
        "query_pre_attn_scalar": "score_scalar",
        "add_qkv_bias": "has_qkv_bias",
        "add_attention_output_bias": "has_attention_output_bias",
        "add_mlp_bias": "has_mlp_bias",
    }
)
ACTIVATION_FIELDS = (
    *("swiglu", "geglu", "quick_geglu", "reglu", "liglu", "relu", "squared_relu", "xielu"),
    "bias_gelu_fusion",
)


@dataclass(frozen=True)
class Number:
    """A number: its key in config.json, the field of ModelConfig, the default of transformers.

    None is a value where the default is None, and where it `may_be_none`. `old_keys` are read too;
    `copies` are keys that only repeat the number, and are written with it.
    """

    key: str
    field: str
    default: float | None = None
    old_keys: tuple[str, ...] = ()
    copies: tuple[str, ...] = ()
    may_be_none: bool = False

    def read(self, content: Mapping[str, Any], location: str) -> dict[str, Any]:
        return {self.field: self.value(content, location)}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        value = value_in(model, self.field)
        is_whole = isinstance(self.default, int) and value is not None and value % 1 == 0
        return dict.fromkeys((self.key, *self.copies), int(value) if is_whole else value)

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
class Choice:
    """A key with a few values, and the fields of ModelConfig that each of them sets.

    Without the key it is the default of transformers; null is false if that is a value. Of values
    that set the same fields the first is written, and for a model whose fields no value sets the
    default.
    """

    key: str
    default: bool | str | float | None
    values: Mapping[bool | str | float | None, Mapping[str, Any]]

    def read(self, content: Mapping[str, Any], location: str) -> dict[str, Any]:
        chosen = content.get(self.key, self.default)
        if chosen is None and False in self.values:
            chosen = False
        for value, fields in self.values.items():
            if type(chosen) is type(value) and chosen == value:
                return dict(fields)
        expected = " or ".join(map(json.dumps, self.values))
        raise InputError(f"{location}: {self.key} is {chosen!r}; expected {expected}")

    def write(self, model: ModelConfig) -> dict[str, Any]:
        for value, fields in self.values.items():
            if all(value_in(model, name) == expected for name, expected in fields.items()):
                return {self.key: value}
        return {self.key: self.default}


@dataclass(frozen=True)
class Power:
    """A number above 0 whose power with an exponent is the field of ModelConfig."""

    key: str
    field: str
    exponent: int
    default: float

    def read(self, content: Mapping[str, Any], location: str) -> dict[str, Any]:
        number = Number(self.key, self.field, self.default).value(content, location)
        if not 1e-30 < number < 1e30:
            raise InputError(f"{location}: {self.key} is {number!r}; expected a number above 0")
        return {self.field: _rounded(number**self.exponent, 12)}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        return {self.key: _rounded(value_in(model, self.field) ** (1 / self.exponent), 15)}


@dataclass(frozen=True)
class Absent:
    """A key that must be null or missing: our model has nothing like it."""

    key: str

    def read(self, content: Mapping[str, Any], location: str) -> dict[str, Any]:
        if content.get(self.key) is not None:
            raise InputError(
                f"{location}: {self.key} is {content[self.key]!r}, which is not supported; only "
                "null is"
            )
        return {}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        return {}


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


@dataclass(frozen=True)
class SquareOutput:
    """The width of a head, which all heads together make the width of the model."""

    default: int

    def read(self, content: Mapping[str, Any], location: str) -> dict[str, Any]:
        width = Number("head_dim", "kv_channels", self.default).value(content, location)
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
        return {"head_dim": model.head_dim}


def value_in(model: ModelConfig, field: str) -> Any:
    """Return what a field of a model amounts to."""
    return getattr(model, PROPERTIES.get(field, field))


def only(key: str, value: bool | str | float, **fields: Any) -> Choice:
    """Return the setting of a key with one value, also its default, and the fields that it sets."""
    return Choice(key, value, {value: fields})


def null_or(key: str, value: float) -> Choice:
    """Return the setting of a key that may have one value, which means what null does."""
    return Choice(key, None, {None: {}, value: {}})


def switch(key: str, default: bool, *fields: str) -> Choice:
    """Return the setting of a key that is true or false as `fields` are."""
    return Choice(key, default, {value: dict.fromkeys(fields, value) for value in (True, False)})


def opposite(key: str, default: bool, field: str) -> Choice:
    """Return the setting of a key that is true where a field is false."""
    return Choice(key, default, {value: {field: not value} for value in (True, False)})


def scaled_scores() -> Choice:
    """Return the setting of a key that is false if attention's scores are not divided."""
    scores = {True: None, False: 1.0}
    values = {value: {"query_pre_attn_scalar": scalar} for value, scalar in scores.items()}
    return Choice("scale_attn_weights", True, values)


def activation(names: str, key: str, default: str) -> Choice:
    """Return the setting of the MLP's nonlinearity, with the `names` of `activations.toml`."""
    usual = {field: getattr(ModelConfig(), field) for field in ACTIVATION_FIELDS}
    fields = with_like(read_toml(__package__, "activations.toml"), names)
    return Choice(key, default, {name: usual | each for name, each in fields.items()})


def with_like(tables: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return what a table says, and what the table says that it is `like`."""
    own = dict(tables[name])
    return with_like(tables, own.pop("like")) | own if "like" in own else own


def _rounded(value: float, digits: int) -> float:
    """Round to significant digits, so that writing and reading a power changes nothing."""
    return float(f"{value:.{digits}g}")
