"""Reads a command line: which flags were typed, with which values, in which spelling.

The grammar is `--flag`, `--flag value ...` or `--flag=value`; `-` and `_` mean the same inside a
name. Names cannot be abbreviated, and an unknown one is an error.
"""

import difflib
import logging
import textwrap
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from types import MappingProxyType
from typing import Any

from megatron_zpp.settings.flag import Flag, Section
from megatron_zpp.settings.flags_without_effect import what_is_missing
from zeropp.errors import InputError
from zeropp.settings import TYPE_NAMES, settings_of

HELP = ("-h", "--help")
OF_LAUNCHER = ("--local_rank=", "--local-rank=")  # zeropp's and torch.distributed.launch's
WIDTH = 100
FLAG_COLUMN = 42
log = logging.getLogger("megatron_zpp")


@dataclass(frozen=True, kw_only=True)
class Meaning:
    """What a name stands for: a flag that takes values or, with `constant`, one fixed value."""

    flag: Flag
    constant: Any = None


@dataclass(frozen=True, kw_only=True)
class TypedFlag:
    """One flag as it was typed; `spelling` has its dashes, `text` also the values behind it."""

    flag: Flag
    value: Any
    spelling: str
    text: str

    def __str__(self) -> str:
        return self.text


def vocabulary(
    sections: Iterable[type[Section]], idle: Iterable[Flag] = ()
) -> Mapping[str, Meaning]:
    """Every known name, with dashes inside and none in front, and its meaning.

    The names are those of the sections' flags and of `idle` ones, which have no effect.
    """
    meanings: dict[str, Meaning] = {}
    by_name: dict[str, Flag] = {}
    for flag in (*chain.from_iterable(map(settings_of, sections)), *idle):
        first = by_name.setdefault(flag.name, flag)
        assert (first.type, first.default) == (flag.type, flag.default), flag.name
        for name in flag.names:
            constant = True if flag.type is bool else None
            meanings[_plain(name)] = Meaning(flag=flag, constant=constant)
        for name, value in flag.shorthands.items():
            meanings[_plain(name)] = Meaning(flag=flag, constant=value)
    return MappingProxyType(meanings)


def read(argv: Sequence[str], meanings: Mapping[str, Meaning]) -> dict[str, TypedFlag]:
    """The flags that were typed, by the name of their setting.

    Raises InputError for unknown flags and missing or wrong values, all at once, and for
    several names of one setting with different values.
    """
    problems: list[str] = []
    typed: dict[str, TypedFlag] = {}
    repeated: dict[str, TypedFlag] = {}
    for spelling, values in _groups(typed_words(argv)):
        meaning = meanings.get(_plain(spelling[2:]))
        if meaning is None:
            problems.append(_unknown(spelling, meanings))
            continue
        try:
            new = _assignment(meaning, spelling, values)
        except InputError as error:
            problems.append(str(error))
            continue
        old = typed.get(new.flag.name)
        if old is not None and old.value != new.value:
            if old.spelling != new.spelling:
                raise InputError(f"{old} and {new} contradict: they set the same; keep one")
            repeated[new.flag.name] = new
        typed[new.flag.name] = new
    if problems:
        count = f"{len(problems)} mistakes in the command line:"
        raise InputError("\n  ".join([count, *problems] if len(problems) > 1 else problems))
    if repeated:
        log.info("given twice, the last is used: %s", ", ".join(map(str, repeated.values())))
    return typed


def split_flags(
    argv: Sequence[str], names: Container[str], *, short: bool = False
) -> tuple[list[str], list[str]]:
    """The flags of these names with their values, and all other words.

    The names are as `vocabulary` has them. `short`: other flags may begin with one dash.
    """
    ours: list[str] = []
    others: list[str] = []
    words = others
    for word in typed_words(argv):
        if word.startswith("-" if short else "--"):
            is_ours = word.startswith("--") and _plain(word[2:].partition("=")[0]) in names
            words = ours if is_ours else others
        words.append(word)
    return ours, others


def build_section(kind: type[Section], typed: Mapping[str, TypedFlag]) -> Section:
    """A section with the flags that were typed and defaults for the others.

    Raises InputError for a value out of range or values that contradict each other.
    """
    names = kind.__dataclass_fields__.keys() & typed.keys()
    section = kind(**{name: typed[name].value for name in names})
    section.check()
    return section


def help_text(
    usage: str,
    sections: Iterable[type[Section]],
    idle: Iterable[Flag] = (),
    apart: Collection[type[Section]] = (),
) -> str:
    """The help: a paragraph for each section, a line for each flag, and flags without effect.

    Flags of the sections in `apart` are left out of others that they are a part of.
    """
    parts = [usage]
    described: set[str] = set()
    hidden = {flag.name for flag in chain.from_iterable(map(settings_of, apart))}
    for section in sections:
        left_out = described if section in apart else described | hidden
        new = [flag for flag in settings_of(section) if flag.name not in left_out]
        described.update(flag.name for flag in new)
        lines = [flag_help(flag) for flag in new]
        lines += [line for flag in new for line in _shorthand_help(flag)]
        title = (section.__doc__ or "").strip().split("\n")[0]
        if lines:
            parts.append("\n".join([title, *lines]))
    reasons: dict[str, list[str]] = {}
    for flag in idle:
        reasons.setdefault(flag.why_ignored, []).append(_names(flag))
    if reasons:
        lines = [line for why, names in reasons.items() for line in _idle_help(why, names)]
        parts.append("\n".join(["Flags that are accepted and have no effect, because:", *lines]))
    return "\n\n".join(parts)


def typed_words(argv: Sequence[str]) -> list[str]:
    """The words of a command line without a launcher's `--local_rank=N`."""
    return [word for word in argv if not word.startswith(OF_LAUNCHER)]


def _groups(argv: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Each flag with the words that follow it, up to the next flag."""
    spelling, values = "", []
    for word in argv:
        if word.startswith("--"):
            if spelling:
                yield spelling, values
            spelling, equals, value = word.partition("=")
            values = [value] if equals else []
        elif not spelling:
            raise InputError(f"{word!r} is not a flag: flags begin with --; see --help")
        else:
            values.append(word)
    if spelling:
        yield spelling, values


def _assignment(meaning: Meaning, spelling: str, values: list[str]) -> TypedFlag:
    flag = meaning.flag
    if meaning.constant is not None:
        if values:
            raise InputError(f"{spelling} takes no value, but {values[0]!r} follows it")
        return TypedFlag(flag=flag, value=meaning.constant, spelling=spelling, text=spelling)
    if not values or "" in values:
        about = flag.help or f"it has no effect here: {flag.why_ignored}"
        raise InputError(f"{spelling} needs a value: {TYPE_NAMES[flag.type]} ({about})")
    count = flag.count or 1
    if count not in ("+", len(values)):
        raise InputError(
            f"{spelling} takes {count} value{'s' * (count > 1)}, but "
            f"{len(values)} follow it: {' '.join(values)}"
        )
    items = tuple(_convert(flag, spelling, value) for value in values)
    value = items if flag.count else items[0]
    flag.check(value, spelling)
    text = flag.assignment(value, spelling)
    return TypedFlag(flag=flag, value=value, spelling=spelling, text=text)


def _convert(flag: Flag, spelling: str, text: str) -> Any:
    """Convert a word to the flag's type; "1e5" is also a whole number."""
    if text.lower() in flag.synonyms:
        return flag.synonyms[text.lower()]
    if flag.type is str:
        return flag.canonical(text)
    try:
        number = float(text)
        if flag.type is float:
            return number
        return int(number) if "e" in text.lower() and number.is_integer() else int(text)
    except (ValueError, OverflowError):
        raise InputError(f"{spelling} {text}: expected {flag.expected()}") from None


def _unknown(spelling: str, meanings: Mapping[str, Meaning]) -> str:
    name = _plain(spelling[2:])
    missing = what_is_missing(name)
    if missing:
        return f"{spelling} is not available: {missing}"
    close = difflib.get_close_matches(name, meanings, n=3, cutoff=0.6)
    nearest = ", ".join(f"--{close_name}" for close_name in close)
    hint = f"the nearest known are {nearest}" if len(close) > 1 else f"did you mean {nearest}?"
    return f"unknown flag {spelling}; {hint if close else 'see --help for the known ones'}"


def _plain(name: str) -> str:
    return name.replace("_", "-")


def _names(flag: Flag) -> str:
    """All names of a flag, with what its value is."""
    switches = flag.shorthands if flag.type is bool else ()
    names = ", ".join(f"--{name}" for name in [*flag.names, *switches])
    if flag.type is bool:
        return names
    metavar = {int: "N", float: "X", str: "NAME"}[flag.type]
    metavar = "|".join(map(flag.text, flag.choices)) if flag.choices else metavar
    repeat = flag.count if isinstance(flag.count, int) else 1
    return f"{names} {' '.join([metavar] * repeat)}" + (" ..." if flag.count == "+" else "")


def flag_help(flag: Flag) -> str:
    """The lines about a flag: its names, its values, what it does and its default."""
    text = flag.help
    defaults = flag.default if isinstance(flag.default, tuple) else (flag.default,)
    if flag.type is not bool and None not in defaults:
        text += f" (default {' '.join(map(flag.text, defaults))})"
    return _line(_names(flag), text)


def _idle_help(why: str, names: Sequence[str]) -> list[str]:
    """A reason, and below it the flags that have no effect for it."""
    unbroken = partial(textwrap.wrap, break_long_words=False, break_on_hyphens=False)
    lines = [textwrap.wrap(why, WIDTH - 2), unbroken(", ".join(names), WIDTH - 4)]
    return [
        " " * indent + line for indent, part in zip((2, 4), lines, strict=True) for line in part
    ]


def _shorthand_help(flag: Flag) -> list[str]:
    """A line for each shorthand of a flag that takes values."""
    if flag.type is bool:
        return []
    return [
        _line(f"--{name}", f"the same as {flag.assignment(value)}")
        for name, value in flag.shorthands.items()
    ]


def _line(names: str, text: str) -> str:
    indent = " " * FLAG_COLUMN
    lines = textwrap.wrap(text, WIDTH - FLAG_COLUMN)
    first = f"  {names}"
    if len(first) + 2 <= FLAG_COLUMN:
        first = first.ljust(FLAG_COLUMN) + lines.pop(0)
    return "\n".join([first, *(indent + line for line in lines)])
