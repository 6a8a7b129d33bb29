"""Rotary positions in a config.json: the base, and the scaling of Llama 3.1 and later.

Versions before 5 of transformers write `rope_theta` and `rope_scaling`, later ones both of them in
`rope_parameters`. The former are written here: all versions read them.
"""

from collections.abc import Mapping
from typing import Any

from megatron_zpp.config import ModelConfig
from megatron_zpp.model.layers import FAST_TURNS, SLOW_TURNS, TRAINED_POSITIONS
from zeropp.errors import InputError

DEFAULT_BASE = 10000.0
KNOWN = ("default", "llama3")
FIXED = (  # of llama3's settings, those that --use-rope-scaling implies
    ("low_freq_factor", SLOW_TURNS),
    ("high_freq_factor", FAST_TURNS),
    ("original_max_position_embeddings", TRAINED_POSITIONS),
)


def read_rope(content: Mapping[str, Any], place: str) -> dict[str, Any]:
    """The fields of ModelConfig; InputError for another kind of scaling, named with the known."""
    new = content.get("rope_parameters") or {}
    scaling = content.get("rope_scaling") or new
    base = new.get("rope_theta", content.get("rope_theta", DEFAULT_BASE))
    if not isinstance(base, int | float) or base < 1 or int(base) != base:
        raise InputError(f"{place}: rope_theta is {base!r}; expected a whole number")
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind not in KNOWN:
        raise InputError(
            f"{place}: rotary positions of type {kind!r} are not known here; known are "
            f"{', '.join(KNOWN)}"
        )
    part = new.get("partial_rotary_factor", content.get("partial_rotary_factor", 1.0))
    if part not in (None, 1.0):
        raise InputError(f"{place}: partial_rotary_factor is {part!r}; only 1.0 is known here")
    fields = {"rotary_base": int(base)}
    if kind == "llama3":
        for key, only in FIXED:
            if scaling.get(key) != only:
                raise InputError(
                    f"{place}: {key} of the llama3 scaling is {scaling.get(key)!r}; only {only} is "
                    "known here"
                )
        fields |= {"use_rope_scaling": True, "rope_scaling_factor": float(scaling["factor"])}
    return fields


def write_rope(model: ModelConfig) -> dict[str, Any]:
    """The keys of a config.json that say how our model's positions turn."""
    scaling = None
    if model.use_rope_scaling:
        scaling = {"rope_type": "llama3", "factor": model.rope_scaling_factor, **dict(FIXED)}
    return {"rope_theta": float(model.rotary_base), "rope_scaling": scaling}
