"""What a configuration key is: a dataclass field with facts, checked when a section is made."""

import math
import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from functools import cache
from typing import Any, ClassVar

from zeropp.errors import InputError


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What is known about one key besides its type and default.

    `idle`: why it has no effect; `needs`: the key without which it has none; `refused`: values that
    exist in DeepSpeed and not here, with the reason; `auto`: "auto" may stand for it; `keys`: the
    names inside an object that is accepted whole and has no effect.
    `in_engine`: what `idle` is under `zeropp.initialize` where that differs, "" if honoured.
    """

    choices: tuple = ()
    minimum: float | None = None
    maximum: float | None = None
    refused: Mapping[Any, str] = field(default_factory=dict)
    idle: str = ""
    needs: str = ""
    auto: bool = False
    keys: tuple[str, ...] = ()
    in_engine: str | None = None


@dataclass(frozen=True, kw_only=True)
class Key:
    """One key of a section: its dotted name, its type without `None`, and its facts."""

    name: str
    dotted: str
    kind: Any
    optional: bool
    default: Any
    facts: Facts

    @property
    def section(self) -> "type[Section] | None":
        """The class of the section under this key; `None` for a plain value."""
        nested = isinstance(self.kind, type) and issubclass(self.kind, Section)
        return self.kind if nested else None

    def check(self, value: Any) -> None:
        """Raise `InputError`, naming key and value, unless `value` may stand here."""
        if value is None and self.optional:
            return
        if not _is_of(value, self.kind):
            raise InputError(f"{self.dotted} = {shown(value)}: expected {_expected(self)}")
        values = value if isinstance(value, tuple) else (value,)
        for one in values:
            self._check_value(one)

    def _check_value(self, value: Any) -> None:
        facts = self.facts
        if isinstance(value, str | int) and value in facts.refused:
            raise InputError(f"{self.dotted} = {shown(value)}: {facts.refused[value]}")
        outside = (facts.minimum is not None and value < facts.minimum) or (
            facts.maximum is not None and value > facts.maximum
        )
        if outside or (facts.choices and value not in facts.choices):
            raise InputError(f"{self.dotted} = {shown(value)}: expected {_expected(self)}")


@dataclass(frozen=True, kw_only=True)
class Section:
    """One object of the JSON; constructing one checks every value in it (raises `InputError`)."""

    path: ClassVar[str] = ""

    def __post_init__(self) -> None:
        for one in keys_of(type(self)):
            one.check(getattr(self, one.name))


@cache
def keys_of(section: type[Section]) -> tuple[Key, ...]:
    """The keys of a section, in the order they are written down here."""
    hints = typing.get_type_hints(section)
    found = []
    for one in fields(section):
        if "facts" in one.metadata:
            kinds = typing.get_args(hints[one.name])
            optional = types.NoneType in kinds
            default = one.default if one.default is not MISSING else one.default_factory()
            found.append(
                Key(
                    name=one.name,
                    dotted=f"{section.path}.{one.name}".lstrip("."),
                    kind=kinds[0] if optional else hints[one.name],
                    optional=optional,
                    default=default,
                    facts=one.metadata["facts"],
                )
            )
    return tuple(found)


def key(default: Any, **facts: Any) -> Any:
    """A field that is a JSON key; `facts` are those of `Facts`."""
    described = Facts(**facts)
    hashable = not described.keys
    return field(default=default, hash=hashable, metadata={"facts": described})


def idle(default: Any, reason: str, **facts: Any) -> Any:
    """A field that is accepted and has no effect here, because of `reason`."""
    return key(default, idle=reason, **facts)


def shown(value: Any) -> str:
    """A value as the JSON file would spell it."""
    if isinstance(value, bool | None):
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, tuple | list):
        return f"[{', '.join(shown(one) for one in value)}]"
    return str(dict(value)) if isinstance(value, Mapping) else str(value)


def _is_of(value: Any, kind: Any) -> bool:
    """Whether a value has a type, without Python's leniency: true is not 1, NaN is not a number."""
    if typing.get_origin(kind) is tuple:
        parts = typing.get_args(kind)
        alike = isinstance(value, tuple) and len(value) == len(parts)
        return alike and all(_is_of(one, part) for one, part in zip(value, parts, strict=True))
    if kind is float:
        return type(value) in (int, float) and math.isfinite(value)
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))


def _expected(one: Key) -> str:
    """What may stand for a key, in words."""
    facts = one.facts
    names = {bool: "true or false", int: "an integer", float: "a number", str: "a string"}
    pair = typing.get_origin(one.kind) is tuple
    kind = typing.get_args(one.kind)[0] if pair else one.kind
    words = names.get(kind, "an object")
    if facts.choices:
        words = f"one of {', '.join(shown(choice) for choice in facts.choices)}"
    elif facts.minimum is not None and facts.maximum is not None:
        words += f" from {facts.minimum} to {facts.maximum}"
    elif facts.minimum is not None:
        words += f" of at least {facts.minimum}"
    elif facts.maximum is not None:
        words += f" of at most {facts.maximum}"
    words = f"two values, each {words}" if pair else words
    return words + (" or null" if one.optional else "") + (' or "auto"' if facts.auto else "")
