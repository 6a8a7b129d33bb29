"""Command line to assignments: which flag was typed, with which value, in which spelling.

The grammar is `--flag`, `--flag value ...` or `--flag=value`; `-` and `_` mean the same inside a
name. Everything that is typed must be known: nothing is abbreviated and nothing is skipped.
"""

import difflib
import logging
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from megatron_zpp.settings.flag import Flag, Section, check_value, flags
from megatron_zpp.settings.json_flags import Shorthand
from zeropp.errors import InputError

HELP = ("-h", "--help")
WIDTH = 100
FLAG_COLUMN = 42
# Megatron's flags for what this project does not do, by the beginning of their names.
ABSENT = (
    (("num-experts", "moe-", "expert-", "create-moe", "disable-moe"), "mixture of experts"),
    (("fp8-", "fp4-"), "computing in 8 or 4 bits"),
    (("kd", "load-teacher", "mos"), "knowledge distillation"),
    (("rl-", "grpo-"), "reinforcement learning"),
    (("mamba-", "hybrid-"), "state-space layers"),
    (("mtp-",), "multi-token prediction"),
    (("retro-", "retriever-"), "retrieval"),
    (("data-efficiency-", "random-ltd", "curriculum-"), "curricula and token dropping"),
)
KINDS = MappingProxyType({int: "a whole number", float: "a number", str: "a text"})

log = logging.getLogger("megatron_zpp")


@dataclass(frozen=True, kw_only=True)
class Meaning:
    """What a spelling stands for: a flag taking values or, with `constant`, one fixed value."""

    flag: Flag
    constant: Any = None

    @property
    def takes_value(self) -> bool:
        """Whether values follow the flag."""
        return self.constant is None


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """One flag as it was typed; `spelling` has its dashes."""

    flag: Flag
    value: Any
    spelling: str
    is_constant: bool

    def __str__(self) -> str:
        if self.is_constant:
            return self.spelling
        values = self.value if isinstance(self.value, tuple) else (self.value,)
        return " ".join([self.spelling, *(_number(value) for value in values)])


def vocabulary(
    sections: Iterable[type[Section]], shorthands: Iterable[Shorthand]
) -> Mapping[str, Meaning]:
    """Every known name, with dashes inside and none in front, and its meaning."""
    words: dict[str, Meaning] = {}
    by_dest: dict[str, Flag] = {}
    for section in sections:
        for flag in flags(section):
            shared = by_dest.setdefault(flag.dest, flag)
            assert (shared.kind, shared.default) == (flag.kind, flag.default), flag.dest
            words.update(
                (_plain(name), Meaning(flag=flag, constant=True if flag.kind is bool else None))
                for name in flag.names
            )
            words.update((_plain(name), Meaning(flag=flag, constant=False)) for name in flag.off)
    for short in shorthands:
        words[short.name] = Meaning(flag=by_dest[short.dest], constant=short.value)
    return words


def read(argv: Sequence[str], words: Mapping[str, Meaning]) -> dict[str, Assignment]:
    """The assignments by destination.

    Raises InputError for an unknown flag, a missing or wrong value, and spellings that disagree.
    """
    typed: dict[str, Assignment] = {}
    for spelling, values in _groups(argv):
        meaning = words.get(_plain(spelling[2:]))
        if meaning is None:
            raise InputError(_unknown(spelling, words))
        new = _assignment(meaning, spelling, values)
        old = typed.get(new.flag.dest)
        if old is not None and old.value != new.value:
            if old.spelling != new.spelling:
                raise InputError(f"{old} and {new} contradict: they set the same; keep one")
            log.info("%s is given twice: the last, %s, is used", old.spelling, new)
        typed[new.flag.dest] = new
    return typed


def help_text(
    usage: str, sections: Iterable[type[Section]], shorthands: Iterable[Shorthand]
) -> str:
    """The help, a paragraph for each section and a line for each flag."""
    parts = [usage]
    seen: set[str] = set()
    for section in sections:
        new = [flag for flag in flags(section) if flag.dest not in seen]
        seen.update(flag.dest for flag in new)
        lines = [_described(flag) for flag in new]
        lines += [
            _line(f"--{short.name}", short.help)
            for short in shorthands
            if short.dest in {flag.dest for flag in new}
        ]
        title = (section.__doc__ or "").strip().split("\n")[0]
        parts.append("\n".join([title, *lines]))
    return "\n\n".join(parts)


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


def _assignment(meaning: Meaning, spelling: str, values: list[str]) -> Assignment:
    flag = meaning.flag
    if not meaning.takes_value:
        if values:
            raise InputError(f"{spelling} takes no value, but {values[0]!r} follows it")
        return Assignment(flag=flag, value=meaning.constant, spelling=spelling, is_constant=True)
    if not values or "" in values:
        raise InputError(f"{spelling} needs a value: {KINDS[flag.kind]} ({flag.help})")
    wanted = flag.count or 1
    if isinstance(wanted, int) and len(values) != wanted:
        raise InputError(
            f"{spelling} takes {wanted} value{'s' * (wanted > 1)}, but "
            f"{len(values)} follow it: {' '.join(values)}"
        )
    read_values = tuple(_converted(flag, spelling, value) for value in values)
    value = read_values if flag.count else read_values[0]
    check_value(flag, value, spelling)
    return Assignment(flag=flag, value=value, spelling=spelling, is_constant=False)


def _converted(flag: Flag, spelling: str, text: str) -> Any:
    if flag.choices is not None:
        return _chosen(flag.choices, spelling, text)
    if flag.kind is str:
        return text
    try:
        number = float(text)
        if flag.kind is float:
            return number
        return int(number) if "e" in text.lower() and number.is_integer() else int(text)
    except (ValueError, OverflowError):
        raise InputError(f"{spelling} {text}: expected {KINDS[flag.kind]}") from None


def _chosen(choices: tuple[str, ...], spelling: str, text: str) -> str:
    same = [choice for choice in choices if _plain(choice).lower() == _plain(text).lower()]
    if same:
        return same[0]
    close = difflib.get_close_matches(text, choices, n=1)
    hint = f"; did you mean {close[0]}?" if close else ""
    raise InputError(f"{spelling} {text}: expected one of {', '.join(choices)}{hint}")


def _unknown(spelling: str, words: Mapping[str, Meaning]) -> str:
    name = _plain(spelling[2:])
    for beginnings, what in ABSENT:
        if name.startswith(beginnings):
            return f"{spelling} is not available: there is no {what} here; leave it out"
    close = difflib.get_close_matches(name, words, n=3, cutoff=0.6)
    nearest = ", ".join(f"--{word}" for word in close)
    hint = f"the nearest known are {nearest}" if len(close) > 1 else f"did you mean {nearest}?"
    return f"unknown flag {spelling}; {hint if close else 'see --help for the known ones'}"


def _plain(name: str) -> str:
    return name.replace("_", "-")


def _number(value: Any) -> str:
    return f"{value:.15g}" if isinstance(value, float) else str(value)


def _described(flag: Flag) -> str:
    spelled = ", ".join(f"--{name}" for name in flag.names + flag.off)
    if flag.kind is not bool:
        metavar = {int: "N", float: "X", str: "NAME"}[flag.kind]
        metavar = "|".join(flag.choices) if flag.choices else metavar
        repeat = flag.count if isinstance(flag.count, int) else 1
        spelled += f" {' '.join([metavar] * repeat)}" + (" ..." if flag.count == "+" else "")
    text = flag.help
    if flag.no_effect:
        text = f"no effect here: {flag.no_effect}"
    elif flag.kind is not bool and flag.default is not None:
        text += f" (default {_number(flag.default)})"
    return _line(spelled, text)


def _line(spelled: str, text: str) -> str:
    indent = " " * FLAG_COLUMN
    lines = textwrap.wrap(text, WIDTH - FLAG_COLUMN)
    first = f"  {spelled}"
    if len(first) + 2 <= FLAG_COLUMN:
        first = first.ljust(FLAG_COLUMN) + lines.pop(0)
    return "\n".join([first, *(indent + line for line in lines)])
