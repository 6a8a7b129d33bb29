"""The settings engine: a setting is a dataclass field that carries its range, help and reasons.

`setting` declares one, its type is the field's annotation, `settings_of` lists those of a section.
The keys of DeepSpeed's JSON (`zeropp.settings.json_keys`) and the flags of a command line
(`megatron_zpp.settings.flag`) are both settings; they differ in how a user writes them.
"""

import difflib
import math
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from types import MappingProxyType
from typing import Any, ClassVar

from zeropp.errors import InputError

TYPE_NAMES = MappingProxyType(
    {bool: "true or false", int: "a whole number", float: "a number", str: "a string"}
)
COUNT_NAMES = MappingProxyType({2: "two values, each ", 3: "three values, each ", "+": ""})


@dataclass(frozen=True)
class NoEffect:
    """Why a setting changes nothing: always, or `when` the complete configuration is such."""

    why: str
    when: Callable[[Any], bool] | None = None


def no_effect_line(reasons: Mapping[str, str]) -> str:
    """One line for settings without effect, each with its reason; those of one reason together."""
    by_reason: dict[str, list[str]] = {}
    for name, why in reasons.items():
        by_reason.setdefault(why, []).append(name)
    if len(reasons) == 1:
        return "".join(f"{name} has no effect here: {why}" for name, why in reasons.items())
    parts = [f"{', '.join(names)} ({why})" for why, names in by_reason.items()]
    return f"no effect here: {'; '.join(parts)}"


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One setting of a section.

    `type` is that of one value; `count` is None for a single value, a number for exactly that many,
    "+" for one or more; `optional` settings may be None. `refused` maps values that other
    programs accept to the reason why they are not available here; `why_no_others` is the reason why
    only the `choices` are accepted.
    """

    name: str
    section: "type[Section]"
    type: Any
    count: int | str | None = None
    optional: bool = False
    default: Any
    help: str = ""
    choices: tuple = ()
    minimum: float | None = None
    above: float | None = None
    maximum: float | None = None
    below: float | None = None
    refused: Mapping[Any, str] = field(default_factory=dict)
    why_no_others: str = ""
    no_effect: tuple[NoEffect, ...] = ()

    def text(self, value: Any) -> str:
        """One value as a user writes it."""
        raise NotImplementedError

    def assignment(self, value: Any, name: str = "") -> str:
        """The setting and a value as a user writes them, under `name` if that is given."""
        raise NotImplementedError

    def expected(self) -> str:
        """What the value may be, in words."""
        words = TYPE_NAMES.get(self.type, "an object")
        if self.choices:
            words = f"one of {', '.join(self.text(choice) for choice in self.choices)}"
        elif self.minimum is not None and self.maximum is not None:
            words += f" from {self.text(self.minimum)} to {self.text(self.maximum)}"
        elif self.minimum is not None and self.below is not None:
            words += f" of at least {self.text(self.minimum)} and below {self.text(self.below)}"
        elif self.minimum is not None:
            words += f" of at least {self.text(self.minimum)}"
        elif self.above is not None:
            words += f" above {self.text(self.above)}"
        return COUNT_NAMES.get(self.count, "") + words

    def canonical(self, value: Any) -> Any:
        """`value`, or the choice that differs from it only in case or in - and _."""
        if isinstance(value, str):
            for choice in self.choices:
                if isinstance(choice, str) and _plain(choice) == _plain(value):
                    return choice
        return value

    def check(self, value: Any, name: str = "") -> None:
        """Raise InputError unless `value` has the setting's type and is in its range.

        The message calls the setting `name` if that is given.
        """
        if value is None and self.optional:
            return
        if not self._has_type(value):
            raise self._unexpected(value, self.expected(), name)
        for item in value if isinstance(value, tuple) else (value,):
            self._check_item(item, name)

    def _check_item(self, value: Any, name: str) -> None:
        if isinstance(value, str | int) and value in self.refused:
            raise InputError(f"{self.assignment(value, name)}: {self.refused[value]}")
        if self.choices and value not in self.choices:
            if self.why_no_others:
                raise InputError(f"{self.assignment(value, name)}: {self.why_no_others}")
            raise self._unexpected(value, self.expected() + self._nearest_choice(value), name)
        if isinstance(value, float) and not math.isfinite(value):
            raise self._unexpected(value, "a finite number", name)
        if self.minimum is not None and value < self.minimum:
            raise self._unexpected(value, f"at least {self.text(self.minimum)}", name)
        if self.above is not None and value <= self.above:
            raise self._unexpected(value, f"more than {self.text(self.above)}", name)
        if self.maximum is not None and value > self.maximum:
            raise self._unexpected(value, f"at most {self.text(self.maximum)}", name)
        if self.below is not None and value >= self.below:
            raise self._unexpected(value, f"less than {self.text(self.below)}", name)

    @property
    def why_ignored(self) -> str:
        """Why the setting never has an effect; "" if it may have one."""
        return next((reason.why for reason in self.no_effect if reason.when is None), "")

    def why_no_effect(self, config: Any) -> str:
        """Why the setting changes nothing in a complete configuration; "" if it does."""
        reasons = (
            reason for reason in self.no_effect if reason.when is None or reason.when(config)
        )
        return next((reason.why for reason in reasons), "")

    def _has_type(self, value: Any) -> bool:
        if self.count is None:
            return _is_instance(value, self.type)
        if not isinstance(value, tuple) or self.count not in ("+", len(value)):
            return False
        return all(_is_instance(item, self.type) for item in value)

    def _nearest_choice(self, value: Any) -> str:
        close = difflib.get_close_matches(str(value), map(str, self.choices), n=1)
        return f"; did you mean {self.text(close[0])}?" if close and self.type is str else ""

    def _unexpected(self, value: Any, expected: str, name: str) -> InputError:
        return InputError(f"{self.assignment(value, name)}: expected {expected}")


@dataclass(frozen=True)
class Rule:
    """Settings that contradict each other if `broken` is true of their values.

    `message` says why: each {} in it is replaced by a setting with its value, as a user writes
    them, or with `joins_given` the first one by all that were given.
    """

    names: tuple[str, ...]
    broken: Callable[..., Any]
    message: str
    joins_given: bool = False

    def check(self, section: "Section") -> None:
        """Raise InputError if the values of the section break the rule."""
        values = {name: section.value(name) for name in self.names}
        if self.broken(*values.values()):
            shown = [section.setting(name).assignment(value) for name, value in values.items()]
            if self.joins_given:
                given = zip(shown, values.values(), strict=True)
                shown = [" and ".join(text for text, value in given if value)]
            raise InputError(self.message.format(*shown))


def one_of(*names: str, message: str) -> Rule:
    """At most one of the settings may be given: neither false, 0 nor None."""
    return Rule(names, lambda *values: sum(map(bool, values)) > 1, message, joins_given=True)


def requires(name: str, other: str, message: str) -> Rule:
    """The first setting may be given only together with the other."""
    return Rule((name, other), lambda value, needed: value and not needed, message)


def at_most(lower: str, upper: str, message: str = "{} is larger than {}") -> Rule:
    """The first setting must not exceed the second if both are given."""
    return Rule((lower, upper), lambda low, high: None not in (low, high) and low > high, message)


@dataclass(frozen=True, kw_only=True)
class Section:
    """A group of settings: a frozen dataclass, built by keyword."""

    rules: ClassVar[tuple[Rule, ...]] = ()

    @classmethod
    def setting(cls, name: str) -> Any:
        """The setting of that name."""
        return next(entry for entry in settings_of(cls) if entry.name == name)

    def value(self, name: str) -> Any:
        """The value of the setting of that name."""
        return getattr(self, name)

    def check(self) -> None:
        """Raise InputError for values out of range, and for those that break a rule."""
        for entry in settings_of(type(self)):
            entry.check(getattr(self, entry.name))
        for rule in self.rules:
            rule.check(self)


def setting(
    kind: type[Setting],
    default: Any,
    help: str = "",
    *,
    no_effect: NoEffect | tuple[NoEffect, ...] = (),
    **facts: Any,
) -> Any:
    """Declare a setting as a field of a `Section`; `facts` are further fields of `kind`."""
    if isinstance(no_effect, NoEffect):
        no_effect = (no_effect,)
    declared = dict(facts, help=help, no_effect=no_effect)
    return field(default=default, metadata={"kind": kind, "facts": declared})


@cache
def settings_of(section: type[Section]) -> tuple[Any, ...]:
    """The settings of a section in the order of its fields."""
    hints = typing.get_type_hints(section)
    return tuple(
        entry.metadata["kind"](
            name=entry.name,
            section=section,
            default=entry.default,
            **_type_facts(hints[entry.name]),
            **entry.metadata["facts"],
        )
        for entry in fields(section)
        if "facts" in entry.metadata
    )


def _type_facts(hint: Any) -> dict[str, Any]:
    """The type of one value, their number, and whether None is allowed, from an annotation."""
    optional = isinstance(hint, types.UnionType)
    if optional:
        hint = typing.get_args(hint)[0]
    count = None
    if typing.get_origin(hint) is tuple:
        parts = typing.get_args(hint)
        count = "+" if Ellipsis in parts else len(parts)
        hint = parts[0]
    return {"type": hint, "count": count, "optional": optional}


def _is_instance(value: Any, kind: Any) -> bool:
    """`isinstance` without Python's leniency: true is not 1; an integer may stand for a float."""
    if kind is float:
        return type(value) in (int, float)
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))


def _plain(choice: str) -> str:
    return choice.replace("_", "-").lower()
