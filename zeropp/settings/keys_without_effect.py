"""Keys of the JSON that change nothing: those of `no_effect.toml` and of `refused.toml`."""

from collections.abc import Mapping
from functools import cache
from types import MappingProxyType

from zeropp.settings.json_keys import JsonSection, Key
from zeropp.settings.no_effect_tables import read_toml, settings_without_effect

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
