"""Keys of the JSON that change nothing: those of `no_effect.toml` and of `refused.toml`."""

from collections.abc import Mapping
from functools import cache
from types import MappingProxyType

from zeropp.settings.idle import idle_settings, read_toml
from zeropp.settings.json_keys import JsonSection, Key

_SECTION = "activation_checkpointing"  # which has no other keys


@cache
def idle_keys() -> Mapping[str, Key]:
    """The keys of both tables by dotted name."""
    keys = idle_settings(Key, read_toml(__package__, "no_effect.toml"), section=JsonSection)
    refused = read_toml(__package__, "refused.toml")
    keys |= idle_settings(Key, refused, section=JsonSection, no_effect=())
    keys[_SECTION] = Key(name=_SECTION, section=JsonSection, type=JsonSection, default=None)
    return MappingProxyType(keys)
