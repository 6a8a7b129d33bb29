"""Keys of the JSON that change nothing: those of `no_effect.toml` and of `refused.toml`."""

from collections.abc import Mapping
from functools import cache
from types import MappingProxyType
from typing import Any

from zeropp.settings.json_keys import JsonSection, Key, NoEffect
from zeropp.settings.toml_file import read_toml

_TYPES = MappingProxyType(
    {"boolean": bool, "integer": int, "number": float, "string": str, "object": Mapping}
)
_NOT_ENABLED = " that is not enabled"


@cache
def idle_keys() -> Mapping[str, Key]:
    """The keys of both tables by dotted name, and the section that has no others."""
    keys = {}
    for why, rows in read_toml(__package__, "no_effect.toml").items():
        keys |= {name: _without_effect(name, why, facts) for name, facts in rows.items()}
    for why, rows in read_toml(__package__, "refused.toml").items():
        keys |= {name: _with_one_meaning(name, why, values) for name, values in rows.items()}
    keys["activation_checkpointing"] = _key("activation_checkpointing", JsonSection)
    return MappingProxyType(keys)


def _without_effect(name: str, why: str, facts: str | Mapping[str, Any]) -> Key:
    more = {} if isinstance(facts, str) else dict(facts)
    kind, *alternatives = (more.pop("type") if more else facts).split(" or ")
    if kind.endswith(_NOT_ENABLED):
        kind = kind.removesuffix(_NOT_ENABLED)
        more["not_enabled"] = f"{why}; set it to false, or leave the object out"
    return _key(
        name,
        _TYPES[kind],
        optional="null" in alternatives or kind == "object",
        auto="auto" in alternatives,
        no_effect=(NoEffect(why),),
        **more,
    )


def _with_one_meaning(name: str, why: str, values: list[Any]) -> Key:
    return _key(name, type(values[0]), choices=tuple(values), why_no_others=why)


def _key(name: str, kind: Any, *, optional: bool = False, **facts: Any) -> Key:
    declared = {"count": None, "optional": optional, "default": None, **facts}
    return Key(name=name, section=JsonSection, type=kind, **declared)
