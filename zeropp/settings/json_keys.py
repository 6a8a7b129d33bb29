"""Settings that are keys of DeepSpeed's JSON."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, ClassVar

from zeropp.errors import InputError
from zeropp.settings.schema import NoEffect, Section, Setting, setting


@dataclass(frozen=True, kw_only=True)
class Key(Setting):
    """A key of the JSON.

    `auto`: "auto" may stand for its value; `infinity_is_null`: infinity, which accelerate writes,
    means null; `keys`: the names inside an object that is accepted whole and has no effect, any
    if there are none; `not_enabled`: why such an object may not be switched on; `by_phase`: an
    object from steps to values may stand for the value, which is then `Phases`.
    """

    auto: bool = False
    infinity_is_null: bool = False
    keys: tuple[str, ...] = ()
    not_enabled: str = ""
    by_phase: bool = False

    def check(self, value: Any, name: str = "") -> None:
        """Raise InputError unless the value, or that of each phase, is in the setting's range."""
        for each in phase_values(value) if self.by_phase else (value,):
            super().check(each, name)

    @property
    def dotted(self) -> str:
        """The key with those of the objects it is in, for example `fp16.enabled`."""
        return f"{self.section.path}.{self.name}".lstrip(".")

    @property
    def subsection(self) -> "type[JsonSection] | None":
        """The section under this key; `None` for a plain value."""
        is_section = isinstance(self.type, type) and issubclass(self.type, Section)
        return self.type if is_section else None

    def json_value(self, value: Any) -> Any:
        """A value as JSON has it: lists for tuples, an object for phases."""
        if not isinstance(value, tuple):
            return value
        return {str(step): each for step, each in value} if self.by_phase else list(value)

    def text(self, value: Any) -> str:
        """A value as JSON spells it."""
        return json_text(value)

    def assignment(self, value: Any, name: str = "") -> str:
        """For example `fp16.enabled = true`."""
        return f"{name or self.dotted} = {json_text(self.json_value(value))}"

    def expected(self) -> str:
        """What the value may be, in words."""
        null = " or null" if self.optional else ""
        return super().expected() + null + (' or "auto"' if self.auto else "")


@dataclass(frozen=True, kw_only=True)
class JsonSection(Section):
    """One object of the JSON; constructing one checks every value in it (raises `InputError`)."""

    path: ClassVar[str] = ""

    def __post_init__(self) -> None:
        self.check()


key = partial(setting, Key)
Phases = tuple[tuple[int, int], ...]  # (the steps before a phase, its interval), in order


def read_phases(name: str, content: Mapping) -> Phases:
    """Return the phases in an object as {"0": 1, "2000": 10}; raises InputError for others."""

    def wrong(why: str) -> InputError:
        return InputError(
            f"{name} = {dict(content)}: {why}; expected intervals by the steps where they begin, "
            'as in {"0": 1, "2000": 10}'
        )

    phases = []
    for step, interval in content.items():
        if not str(step).isdecimal():
            raise wrong(f'"{step}" is no number of steps')
        if type(interval) is not int or interval < 1:
            raise wrong(f'"{step}" has the interval {interval}, which is no number of at least 1')
        phases.append((int(step), interval))
    phases.sort()
    if not phases or phases[0][0] != 0:
        raise wrong('nothing begins at step "0"')
    if any(before[0] == after[0] for before, after in pairwise(phases)):
        raise wrong("two phases begin at the same step")
    if any(before[1] > after[1] for before, after in pairwise(phases)):
        raise wrong("an interval is shorter than the one before, and they may only grow")
    return tuple(phases)


def phase_values(value: Any) -> tuple[Any, ...]:
    """Return the values of all phases, or the one of a setting without phases."""
    return tuple(each for _, each in value) if isinstance(value, tuple) else (value,)


def needs(dotted: str) -> NoEffect:
    """The reason of a key without effect while the key `dotted` is false, null or "none"."""
    nothing = (False, None, "none")
    return NoEffect(f"it needs {dotted}", when=lambda zero: zero.value(dotted) in nothing)


def json_text(value: Any) -> str:
    """A value as the JSON file would spell it."""
    return json.dumps(value, ensure_ascii=False, skipkeys=True, default=str)
