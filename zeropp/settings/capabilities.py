"""Finds capabilities by listing their folders, so that nothing else has to name them.

A capability is a folder of `zeropp.capabilities`, or of a package like it; a single module is
one, too. Its module `settings` is imported without torch.
"""

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pkgutil import iter_modules
from types import ModuleType
from typing import Any

CAPABILITIES = "zeropp.capabilities"


@cache  # a plan asks for each candidate
def modules_of(part: str, package: str = CAPABILITIES) -> tuple[ModuleType, ...]:
    """Return the module `part` of each capability that has one, in the order of their names."""
    names = []
    for each in iter_modules(import_module(package).__path__):
        name = f"{package}.{each.name}"
        names.append(f"{name}.{part}" if each.ispkg else name)
    return tuple(import_module(name) for name in names if find_spec(name) is not None)


def keys_of(path: str) -> tuple[type, ...]:
    """Return the sections of keys that capabilities add to the section at `path` of the JSON."""
    return tuple(section for section in declared("KEYS", CAPABILITIES) if section.path == path)


def declared(name: str, package: str, part: str = "settings") -> list[Any]:
    """Return what the tuples or mappings called `name` in all modules `part` hold."""
    found = (getattr(module, name, ()) for module in modules_of(part, package))
    return [each for held in found for each in (held.items() if isinstance(held, dict) else held)]
