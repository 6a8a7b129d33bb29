"""Settings that change nothing, from tables that are files of a package.

A table holds, by reason and by name, what a user may write: a type, as "integer" or "string or
null"; a list, the only values that are accepted; or a mapping with the `type`, the `values` and
further fields of the setting. In the plural a type stands for one or more values.
"""

import sys
from collections.abc import Callable, Mapping
from functools import cache
from importlib import resources
from types import MappingProxyType
from typing import Any

from zeropp.settings.json_keys import JsonSection, Key
from zeropp.settings.schema import NoEffect

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_TYPES = MappingProxyType(
    dict(switch=bool, boolean=bool, integer=int, number=float, string=str, object=Mapping)
)
_NOT_ENABLED = " that is not enabled"
Table = Mapping[str, Mapping[str, Any]]


def read_toml(package: str, name: str) -> dict[str, Any]:
    """Return the contents of the file `name` in the folder of `package`."""
    return tomllib.loads(resources.files(package).joinpath(name).read_text("utf-8"))


def settings_without_effect(kind: Callable[..., Any], table: Table, **more: Any) -> dict[str, Any]:
    """The settings of a table by name, each made by `kind` from its fields, `more` among them."""
    return {
        name: kind(name=name, default=None, **{**_facts_of(why, facts), **more})
        for why, rows in table.items()
        for name, facts in rows.items()
    }


def _facts_of(why: str, facts: str | list | Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a setting that one row of a table describes."""
    if isinstance(facts, str):
        facts = {"type": facts}
    elif isinstance(facts, list):
        facts = {"values": facts}
    result = {"no_effect": (NoEffect(why),), **facts}
    if choices := tuple(result.pop("values", ())):
        result |= {"choices": choices, "why_no_others": f"{why}; leave it out"}
    words, *alternatives = result.pop("type", "").split(" or ")
    if words.endswith(_NOT_ENABLED):
        words = words.removesuffix(_NOT_ENABLED)
        result["not_enabled"] = f"{why}; set it to false, or leave the object out"
    if "auto" in alternatives:
        result["auto"] = True
    return {
        "type": _TYPES[words.removesuffix("s")] if words else type(choices[0]),
        "count": "+" if words.endswith("s") else None,
        "optional": "null" in alternatives or words == "object",
        **result,
    }


_SECTIONS = ("activation_checkpointing", "checkpoint", "tensor_parallel")  # have no other keys


@cache
def keys_without_effect() -> Mapping[str, Key]:
    """The keys of both tables by dotted name."""
    idle, refused = (read_toml(__package__, f"{name}.toml") for name in ("no_effect", "refused"))
    keys = settings_without_effect(Key, idle, section=JsonSection)
    keys |= settings_without_effect(Key, refused, section=JsonSection, no_effect=())
    for name in _SECTIONS:
        keys[name] = Key(name=name, section=JsonSection, type=JsonSection, default=None)
    return MappingProxyType(keys)
