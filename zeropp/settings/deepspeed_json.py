"""Strict reading of a DeepSpeed JSON: text to values by dotted key, each checked, none left over.

Every mistake raises an `InputError` that names its place: file, line and column for text that is
not JSON; the dotted key for a key that is unknown, given twice or of the wrong type.
"""

import difflib
import functools
import json
import math
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from zeropp.errors import InputError
from zeropp.exports import CAPABILITIES, declared
from zeropp.settings.json_keys import JsonSection, Key, json_text, read_phases
from zeropp.settings.no_effect_tables import keys_without_effect, read_toml
from zeropp.settings.schema import settings_of

_ZERO = "zero_optimization"
# Old name -> (today's names, and what true and false mean; None: the value stays as it is).
OLD_NAMES: Mapping[str, tuple[tuple[str, ...], Mapping[bool, Any] | None]] = MappingProxyType(
    {
        **{old: ((new,), None) for old, new in read_toml(__package__, "old_names.toml").items()},
        **dict(declared("OLD_NAMES", CAPABILITIES)),
    }
)
AUTO = "auto"
SHOWN_COLUMNS = 60  # on either side of a mistake


@dataclass(frozen=True, kw_only=True)
class JsonValues:
    """What a JSON gives: values by dotted key, the keys set to "auto", and the old names in it.

    `others` are keys at its top that are not DeepSpeed's: its user's. `source` is what error
    messages call the JSON.
    """

    values: Mapping[str, Any] = field(default_factory=dict)
    auto_keys: frozenset[str] = frozenset()
    old_names: tuple[str, ...] = ()
    others: Mapping[str, Any] = field(default_factory=dict)
    source: str = "configuration"

    def assignment(self, dotted: str) -> str:
        """A key and its value for a message, with the file's name."""
        return f"{dotted} = {json_text(self.values[dotted])} in {self.source}"


def read_json(source: Path | str | Mapping, root: type[JsonSection]) -> JsonValues:
    """Every value in a file, a JSON text or a mapping, checked against the sections below `root`.

    Raises `InputError` for a file that cannot be read; with line, column and that line's text for
    one that is not JSON; with the dotted key for a wrong name or value.
    """
    content, name = _load(source)
    try:
        return _Reader(root).read(content, name)
    except InputError as error:
        raise InputError(f"{name}: {error}") from None


def build(root: type[JsonSection], values: Mapping[str, Any], prefix: str = "") -> Any:
    """A section, and those inside it, from values by dotted key; the rest take their defaults."""
    arguments = {}
    for entry in settings_of(root):
        dotted = prefix + entry.name
        if entry.subsection:
            arguments[entry.name] = build(entry.subsection, values, dotted + ".")
        elif dotted in values:
            arguments[entry.name] = values[dotted]
    return root(**arguments)


@functools.cache
def all_keys(root: type[JsonSection]) -> Mapping[str, Key]:
    """Every key below `root`, the top level, by its dotted name, sections themselves included."""
    return MappingProxyType({**_honoured_keys(root), **keys_without_effect()})


def unknown_key(dotted: str, root: type[JsonSection]) -> InputError:
    """The error for a key that does not exist, with the nearest one that does."""
    names = {*all_keys(root), *OLD_NAMES}
    section, _, last = dotted.rpartition(".")
    elsewhere = [name for name in names if name.rpartition(".")[2] == last]
    siblings = {
        name.rpartition(".")[2]: name for name in names if name.rpartition(".")[0] == section
    }
    close = difflib.get_close_matches(last, siblings, n=1, cutoff=0.6)
    anywhere = difflib.get_close_matches(dotted, sorted(names), n=1, cutoff=0.0)
    nearest = elsewhere[:1] or [siblings[name] for name in close] or anywhere
    return InputError(f'unknown key "{dotted}"; the nearest known key is "{nearest[0]}"')


class _Object(dict):
    """A JSON object that remembers which of its keys were written twice."""

    def __init__(self, pairs: list[tuple[str, Any]]) -> None:
        super().__init__(pairs)
        counts = Counter(name for name, _ in pairs)
        self.repeated = [name for name, count in counts.items() if count > 1]


def _load(source: Path | str | Mapping) -> tuple[Any, str]:
    """The JSON value in a file, a text or a mapping, and the name for it in messages."""
    if isinstance(source, Mapping):
        return source, JsonValues.source
    if isinstance(source, str) and source.lstrip().startswith(("{", "[")):
        return _parse(source, JsonValues.source), JsonValues.source
    if not isinstance(source, str | os.PathLike):
        raise InputError(
            f"the configuration is {source!r}: give a dict, the path of a JSON file, or its text"
        )
    try:
        text = Path(source).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise InputError(f"cannot read the configuration {source}: {reason}") from None
    return _parse(text, str(source)), str(source)


class _Reader:
    """Collects the values of a JSON whose top level is the section `root`."""

    def __init__(self, root: type[JsonSection]) -> None:
        self._root = root
        self._keys = all_keys(root)
        self._values: dict[str, Any] = {}
        self._auto_keys: set[str] = set()
        self._old_values: dict[str, Any] = {}
        self._others: dict[str, Any] = {}

    def read(self, content: Any, source: str) -> JsonValues:
        """Everything in the top-level object; old names are replaced by today's."""
        self._read_section(content, "")
        for name, value in self._old_values.items():
            self._translate(name, value)
        return JsonValues(
            values=self._values,
            auto_keys=frozenset(self._auto_keys),
            old_names=tuple(self._old_values),
            others=self._others,
            source=source,
        )

    def _read_section(self, content: Any, path: str) -> None:
        if not isinstance(content, Mapping):
            where = path or "the top level"
            raise InputError(f"{where} is {json_text(content)}: expected an object, {{...}}")
        prefix = f"{path}." if path else ""
        for name in getattr(content, "repeated", ()):
            raise InputError(f'"{prefix}{name}" is given twice; keep one')
        for name, value in content.items():
            dotted = f"{prefix}{name}"
            if dotted in self._keys and "." not in str(name):
                self._read_value(self._keys[dotted], value)
            elif dotted not in OLD_NAMES:
                if path or _is_misspelt(name, {*self._keys, *OLD_NAMES}):
                    raise unknown_key(dotted, self._root)
                self._others[name] = value
            elif value is not None:
                self._old_values[dotted] = value

    def _read_value(self, entry: Key, value: Any) -> None:
        if entry.subsection:
            if value is not None:  # DeepSpeed's JSON may spell "no such section" as null
                self._read_section(value, entry.dotted)
        elif value == AUTO and entry.auto:
            self._auto_keys.add(entry.dotted)
        else:
            if entry.type is Mapping and isinstance(value, Mapping):
                _check_ignored_object(entry, value)
            is_phases = entry.by_phase and isinstance(value, Mapping)
            value = (
                read_phases(entry.dotted, value) if is_phases else _to_setting_type(value, entry)
            )
            entry.check(value)
            self._values[entry.dotted] = value

    def _translate(self, old: str, value: Any) -> None:
        """Take the value of an old name; raises `InputError` if today's name also has one."""
        names, meaning = OLD_NAMES[old]
        value = value if meaning is None else _to_kind(value, bool)
        if meaning is not None and not isinstance(value, bool):
            raise InputError(f"{old} = {json_text(value)}: expected true or false")
        translated = _Reader(self._root)
        for name in names:
            translated._read_value(self._keys[name], value if meaning is None else meaning[value])
        for name in translated._values.keys() & self._values.keys():
            raise InputError(
                f"{old} = {json_text(value)} is the old name of {name}, "
                f"and {name} = {json_text(self._values[name])} is given too; keep the second"
            )
        self._values.update(translated._values)
        self._auto_keys |= translated._auto_keys


def _is_misspelt(name: Any, keys: Iterable[str]) -> bool:
    """Whether a name at the top can only be meant for one of the keys.

    It is one of `zero_optimization`, or one of the top but for one letter.
    """
    if not isinstance(name, str) or "." in name or f"{_ZERO}.{name}" in keys:
        return True
    return any(_differ_by_one_letter(name, key) for key in keys)


def _differ_by_one_letter(one: str, other: str) -> bool:
    """Whether a letter more, less or another makes one string the other."""
    at = len(os.path.commonprefix([one, other]))
    rests = (one[at:], other[at:])
    after = [rest[1:] for rest in rests]
    return after[0] == after[1] or rests[0] == after[1] or after[0] == rests[1]


@functools.cache
def _honoured_keys(section: type[JsonSection]) -> Mapping[str, Key]:
    keys: dict[str, Key] = {}
    for entry in settings_of(section):
        keys[entry.dotted] = entry
        if entry.subsection:
            keys |= _honoured_keys(entry.subsection)
    return MappingProxyType(keys)


def _check_ignored_object(entry: Key, content: Mapping) -> None:
    for name in content if entry.keys else ():
        if name not in entry.keys:
            nearest = difflib.get_close_matches(str(name), entry.keys, n=1, cutoff=0.0)
            raise InputError(
                f'unknown key "{entry.dotted}.{name}"; '
                f'the nearest known key is "{entry.dotted}.{nearest[0]}"'
            )
    if not isinstance(_to_kind(content.get("enabled", True), bool), bool):
        wrong = json_text(content["enabled"])
        raise InputError(f"{entry.dotted}.enabled = {wrong}: expected true or false")
    enabled = _enabled_in(content, entry.dotted) if entry.not_enabled else None
    if enabled is not None:
        raise InputError(f"{enabled} = true: {entry.not_enabled}")


def _enabled_in(content: Mapping, dotted: str) -> str | None:
    """The first `enabled` that is true in an object, or in those inside if it has none."""
    if "enabled" in content:
        return f"{dotted}.enabled" if _to_kind(content["enabled"], bool) is True else None
    inside = (
        _enabled_in(value, f"{dotted}.{name}")
        for name, value in content.items()
        if isinstance(value, Mapping)
    )
    return next((name for name in inside if name is not None), None)


def _to_setting_type(value: Any, entry: Key) -> Any:
    """A JSON value in the type of its setting: 5e8 as an integer, 1 as true, lists as tuples."""
    if entry.infinity_is_null and value == math.inf:
        return None
    if entry.count is None:
        return _to_kind(entry.canonical(value), entry.type)
    if isinstance(value, list):
        return tuple(_to_kind(item, entry.type) for item in value)
    if type(value) in (int, float):  # one number stands for all
        return (_to_kind(value, entry.type),) * entry.count
    return value


def _to_kind(value: Any, kind: type) -> Any:
    """A number as an integer, a float or, if it is 0 or 1, a boolean; others as they are."""
    if kind is bool and type(value) is int and value in (0, 1):
        return bool(value)
    if kind is int and type(value) is float and value.is_integer():
        return int(value)
    return float(value) if kind is float and type(value) is int else value


def _parse(text: str, name: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_Object, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        raise InputError(_not_json(text, name, error)) from None
    except RecursionError:
        raise InputError(f"{name}: nested too deeply to be a configuration") from None
    except InputError as error:
        raise InputError(f"{name}: {error}") from None


def _refuse_constant(word: str) -> None:
    raise InputError(f"{word} is not a JSON value; write a finite number")


def _not_json(text: str, name: str, error: json.JSONDecodeError) -> str:
    """File, line, column, what is wrong there, that line's text and a caret under the place."""
    if not text.strip():
        return f"{name}: the file is empty; expected a JSON object, at least {{}}"
    at, mistake = _find_mistake(text, error)
    line = text.count("\n", 0, at) + 1
    start = text.rfind("\n", 0, at) + 1
    column = at - start + 1
    first = max(0, column - 1 - SHOWN_COLUMNS)
    shown_line = text[start:].split("\n", 1)[0][first : column + SHOWN_COLUMNS]
    return (
        f"{name}, line {line}, column {column}: not valid JSON: {mistake}\n"
        f"    {shown_line.rstrip().replace(chr(9), ' ')}\n"
        f"    {' ' * (column - 1 - first)}^"
    )


def _find_mistake(text: str, error: json.JSONDecodeError) -> tuple[int, str]:
    """The place and the mistake, the same in every Python version."""
    before = text[: error.pos].rstrip()
    rest = text[error.pos :].lstrip()
    if rest[:1] in ("}", "]") and before.endswith(","):
        return len(before) - 1, f'a comma before "{rest[0]}" with nothing after it'
    if rest.startswith(",") and rest[1:].lstrip()[:1] in ("}", "]"):
        at = len(text) - len(rest)
        return at, f'a comma before "{rest[1:].lstrip()[0]}" with nothing after it'
    at = len(text) - len(rest) if rest else len(before)
    if not rest:
        return at, "the text ends before its last brace"
    if rest[0] in "#/":
        return at, "JSON has no comments"
    if rest[0] == "'":
        return at, "strings are written with double quotes"
    if error.msg.startswith("Expecting ',' delimiter"):
        return at, "a comma is missing before this"
    if error.msg.startswith("Invalid control character"):
        return error.pos, "a string ends on the line it begins on"
    words = error.msg.removesuffix(" at").removesuffix(" starting")
    return at, words[:1].lower() + words[1:]
