"""Megatron's flags that change nothing, and those that ask for what is not here.

`no_effect.toml` lists the first, `refused.toml` the second; both say why.
"""

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cache
from types import MappingProxyType
from typing import Any

from megatron_zpp.settings.flag import Flag, SameAs, Section
from zeropp.settings.schema import NoEffect
from zeropp.settings.toml_file import read_toml

_TYPES = MappingProxyType({"switch": bool, "integer": int, "number": float, "string": str})


@cache
def idle_flags() -> tuple[Flag, ...]:
    """The flags of `no_effect.toml`."""
    return flags_of(read_toml(__package__, "no_effect.toml"))


@cache
def refused_flags() -> Mapping[str, Sequence[str]]:
    """The patterns of names in `refused.toml`, by what is missing."""
    return MappingProxyType(read_toml(__package__, "refused.toml"))


def flags_of(table: Mapping[str, Mapping[str, Any]]) -> tuple[Flag, ...]:
    """The flags of a table like `no_effect.toml`: by reason, by name, what follows the name."""
    return tuple(
        _flag(name, why, facts) for why, rows in table.items() for name, facts in rows.items()
    )


def what_is_missing(name: str) -> str:
    """What a flag of Megatron's would need and what to do, "" for any other name without dashes."""
    for missing, patterns in refused_flags().items():
        if any(fnmatchcase(name, pattern) for pattern in patterns):
            return missing
    return ""


def _flag(name: str, why: str, facts: str | list | Mapping[str, Any]) -> Flag:
    if isinstance(facts, str):
        facts = {"type": facts}
    elif isinstance(facts, list):
        facts = {"values": facts}
    more = dict(facts)
    choices = tuple(more.pop("values", ()))
    kind = more.pop("type", "")
    key = more.pop("same_as", None)
    return Flag(
        name=name,
        section=Section,
        type=_TYPES[kind.removesuffix("s")] if kind else type(choices[0]),
        count="+" if kind.endswith("s") else None,
        optional=False,
        default=None,
        choices=choices,
        why_no_others=f"{why}; leave it out" if choices else "",
        same_as=SameAs(key) if key else None,
        no_effect=(NoEffect(why),),
        **more,
    )
