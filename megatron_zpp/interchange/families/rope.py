"""Rotary positions in a config.json: the base, and how frequencies are scaled for long texts.

transformers before version 5 writes the keys `rope_theta` and `rope_scaling`, later versions write
one object `rope_parameters`. All versions read the former, so those are written here.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_zpp.interchange.families.layers import FULL, WINDOW
from megatron_zpp.settings.config import ModelConfig
from zeropp.errors import InputError

LONGROPE = ("longrope", "su")  # the second is its first name
FIRST_LENGTH = "original_max_position_embeddings"


@dataclass(frozen=True, kw_only=True)
class Rotary:
    """Rotary positions: the keys for the base and for the share of rotated channels, and the types.

    `default_share` is the share where config.json does not have the key; a family that is not
    `is_partial` rotates all channels. `channels` is a key for the number of rotated channels of a
    head, in place of the share. `default_scaling` is how frequencies are scaled where config.json
    does not say it. LongRoPE is read in every family, and written only for the
    one that `writes_longrope`, where other programs expect it. `dynamic` scaling is none here: it
    begins with texts longer than all positions.
    """

    base: str = "rope_theta"
    default_base: float = 10000.0
    share: str = "partial_rotary_factor"
    default_share: float = 1.0
    is_partial: bool = False
    channels: str | None = None
    default_scaling: Mapping[str, Any] | None = None
    rope_types: tuple[str, ...] = ("default", "dynamic", "linear", "llama3", "yarn", *LONGROPE)
    writes_longrope: bool = False

    def read(self, content: Mapping[str, Any], location: str) -> dict[str, Any]:
        parameters = json_object(content, "rope_parameters", location)
        scaling = json_object(content, "rope_scaling", location) or parameters
        scaling = scaling or self.default_scaling or {}
        base = parameters.get("rope_theta", content.get(self.base, self.default_base))
        share = parameters.get("partial_rotary_factor", self._share(content, location))
        self._check_share(share, location)
        return {
            "position_embedding_type": "rope",
            "rotary_base": checked_base(base, location),
            "rotary_percent": float(share),
            **self._read_scaling(scaling, content, location),
        }

    def write(self, model: ModelConfig) -> dict[str, Any]:
        content = {self.base: float(model.rotary_base)}
        if self.is_partial:
            content[self.share] = model.rotary_percent
        if self.channels is not None:
            content[self.channels] = model.rotary_channels
        scaling = self._written_scaling(model)
        if self.default_scaling is not None:
            scaling = scaling or {"rope_type": "default"}
        if scaling:
            content["rope_scaling"] = scaling
        if self.writes_longrope and model.longrope_long_factors is not None:
            content[FIRST_LENGTH] = model.longrope_original_positions
        return content

    def _read_scaling(
        self, scaling: Mapping[str, Any], content: Mapping[str, Any], location: str
    ) -> dict[str, Any]:
        rope_type = scaling.get("rope_type", scaling.get("type", "default"))
        if rope_type not in self.rope_types:
            raise InputError(
                f"{location}: rotary positions of type {rope_type!r} are not supported; supported "
                f"are {', '.join(self.rope_types)}"
            )
        if rope_type == "linear":
            factor = scaling.get("factor")
            if not is_number(factor) or factor < 1:
                raise InputError(
                    f"{location}: factor of the linear scaling is {factor!r}; expected a number "
                    "from 1 on"
                )
            return {"rotary_seq_len_interpolation_factor": float(factor)}
        if rope_type == "yarn":
            return _yarn_fields(scaling, content, location)
        if rope_type == "llama3":
            return _llama3_fields(scaling, location)
        return _longrope_fields(scaling, content, location) if rope_type in LONGROPE else {}

    def _written_scaling(self, model: ModelConfig) -> dict[str, Any]:
        """Return what describes how frequencies are scaled; empty if the family does not say it."""
        if model.longrope_long_factors is not None and not self.writes_longrope:
            return {}
        return written_scaling(model)

    def _share(self, content: Mapping[str, Any], location: str) -> Any:
        """Return the share of rotated channels that a config.json says outside of objects."""
        num_channels = content.get(self.channels or "")
        if self.share in content or num_channels is None:
            return content.get(self.share, self.default_share)
        head = content.get("head_dim")
        if not is_number(num_channels) or not is_number(head) or head <= 0:
            raise InputError(
                f"{location}: {self.channels} is {num_channels!r}, of head_dim {head!r}; expected "
                "numbers"
            )
        return num_channels / head

    def _check_share(self, share: Any, location: str) -> None:
        is_supported = is_number(share) and (0 < share <= 1 if self.is_partial else share == 1)
        expected = "a share above 0 and up to 1 is" if self.is_partial else "1.0 is"
        if not is_supported:
            raise InputError(f"{location}: {self.share} is {share!r}; only {expected} supported")


@dataclass(frozen=True, kw_only=True)
class RotaryByLayer(Rotary):
    """Rotary positions that differ in layers with a window: those are not scaled.

    `local_base` is the key of their base in files of transformers before version 5; without a key
    they have the base of the others.
    """

    local_base: str | None = None
    default_local_base: float | None = None

    def read(self, content: Mapping[str, Any], location: str) -> dict[str, Any]:
        by_layer = json_object(content, "rope_parameters", location)
        full, local = (json_object(by_layer, kind, location) for kind in (FULL, WINDOW))
        if local and local.get("rope_type", "default") != "default":
            raise InputError(
                f"{location}: rotary positions of type {local['rope_type']!r} in layers with a "
                "window are not supported; supported is default"
            )
        fields = super().read({**content, "rope_parameters": full}, location)
        default = fields["rotary_base"] if self.local_base is None else self.default_local_base
        base = local.get("rope_theta", content.get(self.local_base or "", default))
        return fields | {"rotary_base_local": checked_base(base, location)}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        content = super().write(model)
        local_base = float(model.rotary_base_local or model.rotary_base)
        if self.local_base is not None:
            content[self.local_base] = local_base
        content["rope_parameters"] = {
            FULL: {
                "rope_type": "default",
                "rope_theta": content[self.base],
                **self._written_scaling(model),
            },
            WINDOW: {"rope_type": "default", "rope_theta": local_base},
        }
        return content


@dataclass(frozen=True, kw_only=True)
class LatentRotary(Rotary):
    """Rotary positions of latent attention, whose scores YaRN scales by `mscale_all_dim`."""

    rope_types: tuple[str, ...] = ("default", "yarn")

    def _read_scaling(
        self, scaling: Mapping[str, Any], content: Mapping[str, Any], location: str
    ) -> dict[str, Any]:
        fields = super()._read_scaling(scaling, content, location)
        if "yarn_attention_factor" not in fields:
            return fields
        of_turned = fields.pop("yarn_attention_factor")
        factor, of_all = fields["rotary_scaling_factor"], float(scaling.get("mscale_all_dim") or 0)
        mscale = float(scaling.get("mscale") or 1)
        if _yarn_scale(factor, mscale) / _yarn_scale(factor, of_all) != of_turned:
            growth = of_turned * _yarn_scale(factor, of_all) - 1
            mscale = growth / (0.1 * math.log(factor)) if factor > 1 else 1.0
        return fields | {"mscale": mscale, "mscale_all_dim": of_all}

    def _written_scaling(self, model: ModelConfig) -> dict[str, Any]:
        scaling = super()._written_scaling(model)
        if scaling.pop("attention_factor", None) is None:
            return scaling
        scaling |= {"mscale": model.mscale, "mscale_all_dim": model.mscale_all_dim}
        if not (model.mscale and model.mscale_all_dim):  # transformers ignores one of them alone
            scaling["attention_factor"] = model.turned_scale
        return scaling


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


def written_scaling(model: ModelConfig) -> dict[str, Any]:
    """Return the object that describes how frequencies are scaled; empty if they are not."""
    if model.use_rope_scaling:
        return {
            "rope_type": "llama3",
            "factor": model.rope_scaling_factor,
            "low_freq_factor": model.rope_scaling_low_freq_factor,
            "high_freq_factor": model.rope_scaling_high_freq_factor,
            FIRST_LENGTH: model.rope_scaling_original_positions,
        }
    if model.longrope_long_factors is not None:
        scaling = {
            "type": "longrope",
            "short_factor": list(model.longrope_short_factors),
            "long_factor": list(model.longrope_long_factors),
        }
        first_length = model.longrope_original_positions
        default = _attention_factor(model.num_positions / first_length, first_length)
        if model.longrope_attention_factor != default:  # older versions know three keys only
            scaling["attention_factor"] = model.longrope_attention_factor
        return scaling
    if model.rope_type == "yarn":
        scaling = {
            "rope_type": "yarn",
            "factor": model.rotary_scaling_factor,
            FIRST_LENGTH: model.yarn_original_max_position_embeddings,
            "beta_fast": model.yarn_beta_fast,
            "beta_slow": model.yarn_beta_slow,
            "attention_factor": model.yarn_attention_factor,
        }
        rounds = model.yarn_correction_range_round_to_int
        return scaling if rounds else {**scaling, "truncate": False}
    if model.rotary_seq_len_interpolation_factor > 1:
        factor = float(model.rotary_seq_len_interpolation_factor)
        return {"rope_type": "linear", "factor": factor}
    return {}


def _yarn_fields(
    scaling: Mapping[str, Any], content: Mapping[str, Any], location: str
) -> dict[str, Any]:
    first_length = _whole_length(scaling.get(FIRST_LENGTH), FIRST_LENGTH, location)
    numbers = {
        "factor": scaling.get("factor"),
        "beta_fast": scaling.get("beta_fast") or 32.0,
        "beta_slow": scaling.get("beta_slow") or 1.0,
    }
    scales = {key: scaling[key] for key in ("mscale", "mscale_all_dim") if scaling.get(key)}
    for key, number in {**numbers, **scales}.items():
        if not is_number(number) or number <= 0:
            raise InputError(f"{location}: {key} of the yarn scaling is {number!r}; not a number")
    factor, beta_fast, beta_slow = map(float, numbers.values())
    default = _yarn_scale(factor)
    if len(scales) == 2:  # transformers ignores one of them alone
        default = _yarn_scale(factor, scales["mscale"])
        default /= _yarn_scale(factor, scales["mscale_all_dim"])
    return {
        "rope_type": "yarn",
        "rotary_scaling_factor": factor,
        "yarn_original_max_position_embeddings": first_length,
        "yarn_beta_fast": beta_fast,
        "yarn_beta_slow": beta_slow,
        "yarn_attention_factor": float(scaling.get("attention_factor") or default),
        "yarn_correction_range_round_to_int": bool(scaling.get("truncate", True)),
    }


def _yarn_scale(factor: float, mscale: float = 1.0) -> float:
    """Return what YaRN multiplies queries and keys by for texts `factor` times as long."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _whole_length(length: Any, key: str, location: str) -> int:
    if not isinstance(length, int) or length < 2:
        raise InputError(f"{location}: {key} is {length!r}; expected a whole number above 1")
    return length


def _longrope_fields(
    scaling: Mapping[str, Any], content: Mapping[str, Any], location: str
) -> dict[str, Any]:
    factors = {}
    for length in ("short", "long"):
        values = scaling.get(f"{length}_factor")
        if not isinstance(values, list) or not all(is_number(value) for value in values):
            raise InputError(f"{location}: {length}_factor is {values!r}; expected numbers")
        factors[f"longrope_{length}_factors"] = tuple(map(float, values))
    first_length = scaling.get(FIRST_LENGTH, content.get(FIRST_LENGTH))
    first_length = _whole_length(first_length, FIRST_LENGTH, location)
    key = "max_position_embeddings"
    last_length = _whole_length(content.get(key), key, location)
    ratio = scaling.get("factor") or last_length / first_length
    attention_factor = scaling.get("attention_factor") or _attention_factor(ratio, first_length)
    return factors | {
        "longrope_original_positions": first_length,
        "longrope_attention_factor": attention_factor,
    }


def _attention_factor(ratio: float, first_length: int) -> float:
    """Return LongRoPE's factor of queries and keys for texts `ratio` times as long as the first."""
    return 1.0 if ratio <= 1 else math.sqrt(1 + math.log(ratio) / math.log(first_length))


def _llama3_fields(scaling: Mapping[str, Any], location: str) -> dict[str, Any]:
    numbers = {key: scaling.get(key) for key in ("factor", "low_freq_factor", "high_freq_factor")}
    for key, number in numbers.items():
        if not is_number(number) or number <= 0:
            raise InputError(
                f"{location}: {key} of the llama3 scaling is {number!r}; expected a number above 0"
            )
    factor, low, high = map(float, numbers.values())
    first_length = _whole_length(scaling.get(FIRST_LENGTH), FIRST_LENGTH, location)
    return {
        "use_rope_scaling": True,
        "rope_scaling_factor": factor,
        "rope_scaling_low_freq_factor": low,
        "rope_scaling_high_freq_factor": high,
        "rope_scaling_original_positions": first_length,
    }


def checked_base(base: Any, location: str) -> float:
    """Return the base of rotary frequencies; raises InputError if it is not a number from 1 on."""
    if not is_number(base) or base < 1:
        raise InputError(f"{location}: rope_theta is {base!r}; expected a number from 1 on")
    return float(base)


def json_object(content: Mapping[str, Any], key: str, location: str) -> Mapping[str, Any]:
    """Return the object at a key, {} if there is none; raises InputError for anything else."""
    value = content.get(key) or {}
    if not isinstance(value, dict):
        raise InputError(f"{location}: {key} is {value!r}; expected an object in braces")
    return value


def is_number(value: Any) -> bool:
    """Whether a value of a JSON file is a finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return math.isfinite(value)
