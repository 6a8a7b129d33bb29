"""DeepSpeed's names without a place of their own here, and those of features that are not here.

`names.toml` says where the first ones are. The others can be imported, so that a program that never
uses them runs; whoever uses one gets an error with the reason.
"""

import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

from zeropp.errors import Unavailable
from zeropp.settings.no_effect_tables import read_toml

ROOT = "zeropp.deepspeed"
_TABLE = MappingProxyType(read_toml(__package__, "names.toml"))
ELSEWHERE: Mapping[str, Mapping[str, list[str]]] = MappingProxyType(_TABLE["elsewhere"])
REFUSED: Mapping[str, str] = MappingProxyType(  # the reason, by name
    {
        name.removesuffix("()"): reason
        for reason, names in _TABLE["refused"].items()
        for name in names
    }
)
MODULES = frozenset(ELSEWHERE).union(
    name
    for names in _TABLE["refused"].values()
    for name in names
    if name.rpartition(".")[2].islower() and not name.endswith("()")
)


class _Refused(type):
    """The class of stand-ins: making an instance, also of a subclass, raises `Unavailable`."""

    def __call__(cls, *_: Any, **__: Any) -> Any:
        raise Unavailable(f"deepspeed.{cls.place} is not available here: {cls.reason}")


def attribute_of(module: str) -> Callable[[str], Any]:
    """Return the `__getattr__` of the module of that full name."""
    return functools.partial(_find, module.removeprefix(ROOT).removeprefix("."))


def add_modules() -> None:
    """Let the modules that are only in the table, and the packages around them, be imported."""
    for dotted in {package for module in MODULES for package in _with_parents(module)}:
        if not _has_file(dotted):
            name = f"{ROOT}.{dotted}"
            module = sys.modules[name] = ModuleType(name, f"DeepSpeed's {dotted}, by its names.")
            module.__path__, module.__getattr__ = [], attribute_of(name)


def _with_parents(dotted: str) -> Iterator[str]:
    while dotted:
        yield dotted
        dotted = dotted.rpartition(".")[0]


def _has_file(dotted: str) -> bool:
    path = Path(__file__).parents[1].joinpath(*dotted.split("."))
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()


@functools.cache
def _find(module: str, name: str) -> Any:
    """Return what a name means in DeepSpeed's module; raise AttributeError if nothing."""
    dotted = f"{module}.{name}".lstrip(".")
    for place, names in ELSEWHERE.get(module, {}).items():
        place = f"{ROOT}{place}".rstrip(".") if place.startswith(".") else place
        their_names = dict(each.partition("=")[::2] for each in names)
        if name in their_names and not place:
            return lambda *_, **__: int(their_names[name])
        if name in their_names:
            return getattr(import_module(place), their_names[name] or name)
        if "*" in names and not name.startswith("__") and hasattr(import_module(place), name):
            return getattr(import_module(place), name)
    if f"{ROOT}.{dotted}" in sys.modules or _has_file(dotted):
        return import_module(f"{ROOT}.{dotted}")
    reason = REFUSED.get(dotted) or REFUSED.get(module)
    if reason is None or name.startswith("_"):
        raise AttributeError(f"module {f'deepspeed.{module}'.rstrip('.')!r} has no {name!r}")
    return _Refused(name, (), {"place": dotted, "reason": reason, "__module__": f"{ROOT}.{module}"})
