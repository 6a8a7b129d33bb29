"""Modules that are imported when they are asked for: those of rooms, and of capabilities.

A room's `__init__.pyi` says which names it hands on from its modules, in imports that editors read
too. Programs that need only errors or file handling then start without importing torch.

Capabilities are found by listing their folders, so that nothing else has to name them. One is a
folder of `zeropp.capabilities`, or of a package like it; a single module is one, too. Its module
`settings` is imported without torch.
"""

import ast
from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from pkgutil import iter_modules
from types import ModuleType
from typing import Any

CAPABILITIES = "zeropp.capabilities"


def exports(package: str, init: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list]:
    """Return `__getattr__`, `__dir__` and `__all__` of a package, whose `__init__.py` is `init`."""
    stub = ast.parse(Path(init).with_suffix(".pyi").read_text())
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    modules = {alias.name: node.module for node in imports for alias in node.names}

    @cache
    def attribute(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        if modules[name] == package:
            return import_module(f"{package}.{name}")
        return getattr(import_module(modules[name]), name)

    names = sorted(modules)
    return attribute, lambda: sorted({*vars(import_module(package)), *names}), names


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
