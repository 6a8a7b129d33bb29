"""Rotary positions in a config.json: the base, and the scaling of Llama 3.1 and later.

transformers before version 5 writes the keys `rope_theta` and `rope_scaling`, later versions write
one object `rope_parameters`. All versions read the former, so those are written here.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_zpp.model.layers import HIGH_FREQ_FACTOR, LOW_FREQ_FACTOR, ORIGINAL_POSITIONS
from megatron_zpp.settings.config import ModelConfig
from zeropp.errors import InputError

DEFAULT_BASE = 10000.0
LLAMA3_SCALING = (  # the only values supported; --use-rope-scaling implies them
    ("low_freq_factor", LOW_FREQ_FACTOR),
    ("high_freq_factor", HIGH_FREQ_FACTOR),
    ("original_max_position_embeddings", ORIGINAL_POSITIONS),
)


@dataclass(frozen=True, kw_only=True)
class RopeKeys:
    """A family's keys for the base and for the share of rotated channels, and its rope types.

    `default_share` is the share where config.json does not have the key.
    """

    base: str
    share: str
    default_share: float
    rope_types: tuple[str, ...]


LLAMA = RopeKeys(
    base="rope_theta",
    share="partial_rotary_factor",
    default_share=1.0,
    rope_types=("default", "llama3"),
)
GPT_NEOX = RopeKeys(
    base="rotary_emb_base", share="rotary_pct", default_share=0.25, rope_types=("default",)
)


def read_rope(content: Mapping[str, Any], keys: RopeKeys, location: str) -> dict[str, Any]:
    """Return the fields of ModelConfig that the content of a config.json sets.

    `location` is named in errors. Raises InputError for values that our model cannot have, such as
    another type of scaling.
    """
    parameters = _object(content, "rope_parameters", location)
    scaling = _object(content, "rope_scaling", location) or parameters
    base = parameters.get("rope_theta", content.get(keys.base, DEFAULT_BASE))
    if not _is_number(base) or base < 1 or int(base) != base:
        raise InputError(f"{location}: rope_theta is {base!r}; expected a whole number")
    rope_type = scaling.get("rope_type", scaling.get("type", "default"))
    if rope_type not in keys.rope_types:
        raise InputError(
            f"{location}: rotary positions of type {rope_type!r} are not supported; supported are "
            f"{', '.join(keys.rope_types)}"
        )
    share = parameters.get("partial_rotary_factor", content.get(keys.share, keys.default_share))
    _check_share(share, keys, location)
    fields = {"rotary_base": int(base), "rotary_percent": float(share)}
    if rope_type == "llama3":
        factor = _llama3_factor(scaling, location)
        fields |= {"use_rope_scaling": True, "rope_scaling_factor": factor}
    return fields


def write_rope(model: ModelConfig, keys: RopeKeys) -> dict[str, Any]:
    """Return the keys of a config.json that describe the rotary positions of our model."""
    content = {keys.base: float(model.rotary_base)}
    if keys.default_share != 1:
        content[keys.share] = model.rotary_percent
    if model.use_rope_scaling:
        content["rope_scaling"] = {
            "rope_type": "llama3",
            "factor": model.rope_scaling_factor,
            **dict(LLAMA3_SCALING),
        }
    return content


def _check_share(share: Any, keys: RopeKeys, location: str) -> None:
    if keys == LLAMA:
        is_supported = _is_number(share) and share == 1
        expected = "1.0 is"
    else:
        is_supported = _is_number(share) and 0 < share <= 1
        expected = "a share above 0 and up to 1 is"
    if not is_supported:
        raise InputError(f"{location}: {keys.share} is {share!r}; only {expected} supported")


def _llama3_factor(scaling: Mapping[str, Any], location: str) -> float:
    for key, supported in LLAMA3_SCALING:
        if scaling.get(key) != supported:
            raise InputError(
                f"{location}: {key} of the llama3 scaling is {scaling.get(key)!r}; only "
                f"{supported} is supported"
            )
    factor = scaling.get("factor")
    if not _is_number(factor):
        raise InputError(
            f"{location}: factor of the llama3 scaling is {factor!r}; expected a number"
        )
    return float(factor)


def _object(content: Mapping[str, Any], key: str, location: str) -> Mapping[str, Any]:
    value = content.get(key) or {}
    if not isinstance(value, dict):
        raise InputError(f"{location}: {key} is {value!r}; expected an object in braces")
    return value


def _is_number(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return math.isfinite(value)
