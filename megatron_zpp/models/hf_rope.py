"""Rotary positions in a config.json: the base, and the scaling of Llama 3.1 and later.

Versions before 5 of transformers write `rope_theta` and `rope_scaling`, later ones both of them in
`rope_parameters`. The former are written here: all versions read them.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_zpp.model.layers import FAST_TURNS, SLOW_TURNS, TRAINED_POSITIONS
from megatron_zpp.settings.config import ModelConfig
from zeropp.errors import InputError

DEFAULT_BASE = 10000.0
KINDS = ("default", "llama3")
FIXED = (  # of llama3's settings, those that --use-rope-scaling implies
    ("low_freq_factor", SLOW_TURNS),
    ("high_freq_factor", FAST_TURNS),
    ("original_max_position_embeddings", TRAINED_POSITIONS),
)


@dataclass(frozen=True, kw_only=True)
class Keys:
    """What a family calls the base and the share of turned channels; the share not written."""

    base: str
    part: str
    default_part: float
    kinds: tuple[str, ...] = KINDS


LLAMA = Keys(base="rope_theta", part="partial_rotary_factor", default_part=1.0)
NEOX = Keys(base="rotary_emb_base", part="rotary_pct", default_part=0.25, kinds=KINDS[:1])


def read_rope(content: Mapping[str, Any], keys: Keys, place: str) -> dict[str, Any]:
    """The fields of ModelConfig; InputError for another kind of scaling, named with the known."""
    new = _object(content, "rope_parameters", place)
    scaling = _object(content, "rope_scaling", place) or new
    base = new.get("rope_theta", content.get(keys.base, DEFAULT_BASE))
    if not _is_number(base) or base < 1 or int(base) != base:
        raise InputError(f"{place}: rope_theta is {base!r}; expected a whole number")
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind not in keys.kinds:
        raise InputError(
            f"{place}: rotary positions of type {kind!r} are not known here; known are "
            f"{', '.join(keys.kinds)}"
        )
    part = new.get("partial_rotary_factor", content.get(keys.part, keys.default_part))
    is_share = _is_number(part) and 0 < part <= 1
    if not is_share or (keys == LLAMA and part != 1):
        known = "1.0 is" if keys == LLAMA else "a share of 1 is"
        raise InputError(f"{place}: {keys.part} is {part!r}; only {known} known here")
    fields = {"rotary_base": int(base), "rotary_percent": float(part)}
    if kind == "llama3":
        for key, only in FIXED:
            if scaling.get(key) != only:
                raise InputError(
                    f"{place}: {key} of the llama3 scaling is {scaling.get(key)!r}; only {only} is "
                    "known here"
                )
        factor = scaling.get("factor")
        if not _is_number(factor):
            raise InputError(
                f"{place}: factor of the llama3 scaling is {factor!r}; expected a number"
            )
        fields |= {"use_rope_scaling": True, "rope_scaling_factor": float(factor)}
    return fields


def write_rope(model: ModelConfig, keys: Keys) -> dict[str, Any]:
    """The keys of a config.json that say how our model's positions turn."""
    content = {keys.base: float(model.rotary_base)}
    if keys.default_part != 1:
        content[keys.part] = model.rotary_percent
    if model.use_rope_scaling:
        scaling = {"rope_type": "llama3", "factor": model.rope_scaling_factor, **dict(FIXED)}
        content["rope_scaling"] = scaling
    return content


def _object(content: Mapping[str, Any], key: str, place: str) -> Mapping[str, Any]:
    value = content.get(key) or {}
    if not isinstance(value, dict):
        raise InputError(f"{place}: {key} is {value!r}; expected an object in braces")
    return value


def _is_number(value: Any) -> bool:
    is_one = isinstance(value, int | float) and not isinstance(value, bool)
    return is_one and math.isfinite(value)
