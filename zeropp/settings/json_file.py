"""Strict reading of a DeepSpeed JSON: text to objects to checked sections, nothing left over.

Whatever is wrong ends with an `InputError` that names the place: file, line and column for text
that is not JSON; the dotted key for a key that is unknown, given twice or of the wrong type.
"""

import difflib
import json
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from zeropp.errors import InputError
from zeropp.settings.schema import Key, Section, keys_of, shown

# Old name -> (today's names, how the value is translated).
RENAMED: Mapping[str, tuple[tuple[str, ...], Mapping[Any, Any] | None]] = types.MappingProxyType(
    {
        "bfloat16": (("bf16",), None),
        "zero_optimization.cpu_offload": (
            ("zero_optimization.offload_optimizer.device",),
            types.MappingProxyType({True: "cpu", False: "none"}),
        ),
        "zero_optimization.cpu_offload_param": (
            ("zero_optimization.offload_param.device",),
            types.MappingProxyType({True: "cpu", False: "none"}),
        ),
        "zero_optimization.cpu_offload_use_pin_memory": (
            (
                "zero_optimization.offload_optimizer.pin_memory",
                "zero_optimization.offload_param.pin_memory",
            ),
            types.MappingProxyType({True: True, False: False}),
        ),
        "zero_optimization.stage3_gather_fp16_weights_on_model_save": (
            ("zero_optimization.stage3_gather_16bit_weights_on_model_save",),
            None,
        ),
    }
)
AUTO = "auto"
SHOWN_COLUMNS = 60  # on either side of a mistake


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What a file says: values by dotted key, the keys left to "auto", and old names met."""

    values: Mapping[str, Any] = field(default_factory=dict)
    auto: frozenset[str] = frozenset()
    renamed: tuple[str, ...] = ()


def read_json(source: Path | str | Mapping) -> tuple[Mapping, str]:
    """The object in a file, a JSON text or a mapping, and the name to give it in errors.

    Raises `InputError` for a file that cannot be read and, with line, column and that line's
    text, for one that is not JSON.
    """
    if isinstance(source, Mapping):
        return source, "configuration"
    if isinstance(source, str) and source.lstrip().startswith(("{", "[")):
        return _parsed(source, "configuration"), "configuration"
    try:
        text = Path(source).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as problem:
        reason = getattr(problem, "strerror", None) or "it is not UTF-8 text"
        raise InputError(f"cannot read the configuration {source}: {reason}") from None
    return _parsed(text, str(source)), str(source)


def read_sections(given: Mapping, root: type[Section]) -> Reading:
    """Every value of a JSON object, checked for name and JSON type against `root`'s sections.

    Raises `InputError` naming the dotted key.
    """
    return _translated(_read(given, root, root), root)


def build(root: type[Section], values: Mapping[str, Any], prefix: str = "") -> Any:
    """A section, and those inside it, from values by dotted key; the rest take their defaults."""
    arguments = {}
    for one in keys_of(root):
        dotted = prefix + one.name
        if one.section:
            arguments[one.name] = build(one.section, values, dotted + ".")
        elif dotted in values:
            arguments[one.name] = values[dotted]
    return root(**arguments)


def all_keys(root: type[Section]) -> Iterator[Key]:
    """Every key below a section, sections themselves included."""
    for one in keys_of(root):
        yield one
        if one.section:
            yield from all_keys(one.section)


def unknown(dotted: str, root: type[Section]) -> InputError:
    """The error for a key that does not exist, with the nearest one that does."""
    known = {one.dotted for one in all_keys(root)} | set(RENAMED)
    section, _, name = dotted.rpartition(".")
    elsewhere = [one for one in known if one.rpartition(".")[2] == name]
    siblings = {one.rpartition(".")[2]: one for one in known if one.rpartition(".")[0] == section}
    close = difflib.get_close_matches(name, siblings, n=1, cutoff=0.6)
    anywhere = difflib.get_close_matches(dotted, sorted(known), n=1, cutoff=0.0)
    nearest = elsewhere[:1] or [siblings[one] for one in close] or anywhere
    return InputError(f'unknown key "{dotted}"; the nearest known key is "{nearest[0]}"')


class _Object(dict):
    """A JSON object that remembers which of its keys were written twice."""

    def __init__(self, pairs: list[tuple[str, Any]]) -> None:
        super().__init__(pairs)
        seen: set[str] = set()
        self.repeated = [name for name, _ in pairs if name in seen or seen.add(name)]


def _read(given: Any, section: type[Section], root: type[Section]) -> Reading:
    path = f"{section.path}." if section.path else ""
    if not isinstance(given, Mapping):
        where = section.path or "the top level"
        raise InputError(f"{where} is {shown(given)}: expected an object, {{...}}")
    for name in getattr(given, "repeated", ()):
        raise InputError(f'"{path}{name}" is given twice; keep one')
    by_name = {one.name: one for one in keys_of(section)}
    result = Reading()
    for name, value in given.items():
        old = path + str(name)
        if name in by_name:
            result = _joined(result, _read_one(by_name[name], value, root))
        elif old in RENAMED and value is not None:
            result = _joined(result, Reading(values={old: value}, renamed=(old,)))
        elif old not in RENAMED:
            raise unknown(old, root)
    return result


def _read_one(one: Key, value: Any, root: type[Section]) -> Reading:
    if one.section:
        # DeepSpeed's JSON may spell "no such section" as null.
        return Reading() if value is None else _read(value, one.section, root)
    if value == AUTO and one.facts.auto:
        return Reading(auto=frozenset({one.dotted}))
    if one.kind is Mapping and isinstance(value, Mapping):
        for name in value:
            if name not in one.facts.keys:
                close = difflib.get_close_matches(str(name), one.facts.keys, n=1, cutoff=0.0)
                nearest = f'; the nearest known key is "{one.dotted}.{close[0]}"' if close else ""
                raise InputError(f'unknown key "{one.dotted}.{name}"{nearest}')
        if not isinstance(value.get("enabled", True), bool):
            wrong = shown(value["enabled"])
            raise InputError(f"{one.dotted}.enabled = {wrong}: expected true or false")
    value = _as_kind(value, one)
    one.check(value)
    return Reading(values={one.dotted: value})


def _as_kind(value: Any, one: Key) -> Any:
    """JSON's spelling of a value made ours: 5e8 for an integer, lists for tuples, any case."""
    pair = typing.get_args(one.kind) if typing.get_origin(one.kind) is tuple else ()
    kind = pair[0] if pair else one.kind
    if pair and isinstance(value, list):
        return tuple(_as_number(item, kind) for item in value)
    if pair and type(value) in (int, float):
        return (_as_number(value, kind),) * len(pair)
    if isinstance(value, str) and kind is str:
        same = [known for known in one.facts.choices if known.lower() == value.lower()]
        return same[0] if same else value
    return _as_number(value, kind)


def _as_number(value: Any, kind: type) -> Any:
    if kind is int and type(value) is float and value.is_integer():
        return int(value)
    return float(value) if kind is float and type(value) is int else value


def _joined(first: Reading, second: Reading) -> Reading:
    return Reading(
        values={**first.values, **second.values},
        auto=first.auto | second.auto,
        renamed=first.renamed + second.renamed,
    )


def _translated(reading: Reading, root: type[Section]) -> Reading:
    """Old names replaced by today's; raises `InputError` where both are given."""
    values = dict(reading.values)
    auto = reading.auto
    for old in reading.renamed:
        names, spelling = RENAMED[old]
        value = values.pop(old)
        if spelling is None:
            other = _read(_nested(names[0], value), root, root)
        elif isinstance(value, bool):
            other = Reading(values=dict.fromkeys(names, spelling[value]))
        else:
            raise InputError(f"{old} = {shown(value)}: expected true or false")
        for name in other.values.keys() & values.keys():
            raise InputError(
                f"{old} = {shown(value)} is the old name of {name}, "
                f"and {name} = {shown(values[name])} is given too; keep the second"
            )
        values.update(other.values)
        auto |= other.auto
    return replace(reading, values=values, auto=auto)


def _nested(dotted: str, value: Any) -> dict:
    """`{"a": {"b": value}}` for "a.b"."""
    for name in reversed(dotted.split(".")):
        value = {name: value}
    return value


def _parsed(text: str, name: str) -> Mapping:
    try:
        return json.loads(text, object_pairs_hook=_Object, parse_constant=_no_constant)
    except json.JSONDecodeError as problem:
        raise InputError(_not_json(text, name, problem)) from None
    except RecursionError:
        raise InputError(f"{name}: nested too deeply to be a configuration") from None
    except InputError as problem:
        raise InputError(f"{name}: {problem}") from None


def _no_constant(word: str) -> None:
    raise InputError(f"{word} is not a JSON value; write a finite number")


def _not_json(text: str, name: str, problem: json.JSONDecodeError) -> str:
    """File, line, column, what is wrong there, that line's text and a caret under the place."""
    if not text.strip():
        return f"{name}: the file is empty; expected a JSON object, at least {{}}"
    at, what = _what_is_wrong(text, problem)
    line = text.count("\n", 0, at) + 1
    start = text.rfind("\n", 0, at) + 1
    column = at - start + 1
    first = max(0, column - 1 - SHOWN_COLUMNS)
    shown_line = text[start:].split("\n", 1)[0][first : column + SHOWN_COLUMNS]
    return (
        f"{name}, line {line}, column {column}: not valid JSON: {what}\n"
        f"    {shown_line.rstrip().replace(chr(9), ' ')}\n"
        f"    {' ' * (column - 1 - first)}^"
    )


def _what_is_wrong(text: str, problem: json.JSONDecodeError) -> tuple[int, str]:
    """The place and the mistake, the same in every Python version."""
    before = text[: problem.pos].rstrip()
    rest = text[problem.pos :].lstrip()
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
    if problem.msg.startswith("Expecting ',' delimiter"):
        return at, "a comma is missing before this"
    if problem.msg.startswith("Invalid control character"):
        return problem.pos, "a string ends on the line it begins on"
    words = problem.msg.removesuffix(" at").removesuffix(" starting")
    return at, words[:1].lower() + words[1:]
