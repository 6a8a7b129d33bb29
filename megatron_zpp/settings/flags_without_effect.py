"""Megatron's flags that change nothing, and those that ask for features which are not implemented.

`no_effect.toml` lists the former, `refused.toml` the latter, with the reasons.
"""

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cache
from types import MappingProxyType

from megatron_zpp.settings.flag import Flag, Section, make_flag
from zeropp.settings import Table, read_toml, settings_without_effect


@cache
def flags_without_effect() -> tuple[Flag, ...]:
    """The flags of `no_effect.toml`."""
    return flags_of(read_toml(__package__, "no_effect.toml"))


@cache
def refused_flags() -> Mapping[str, Sequence[str]]:
    """The patterns of names in `refused.toml`, by what is missing."""
    return MappingProxyType(read_toml(__package__, "refused.toml"))


def flags_of(table: Table) -> tuple[Flag, ...]:
    """The flags of a table like `no_effect.toml`: by reason, by name, what follows the name."""
    return tuple(settings_without_effect(make_flag, table, section=Section).values())


def what_is_missing(name: str) -> str:
    """Why the Megatron flag of this name (without dashes) is refused; "" if it is no such flag."""
    for missing, patterns in refused_flags().items():
        if any(fnmatchcase(name, pattern) for pattern in patterns):
            return missing
    return ""
