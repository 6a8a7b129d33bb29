"""A field of a configuration section and its command-line flag are declared in one place.

`flag(default, help, ...)` makes a dataclass field whose metadata describes the flag; the parser,
the help text and the checks of ranges are generated from it: nothing is written down twice.
"""

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from zeropp.errors import InputError

METADATA_KEY = "flag"


@dataclass(frozen=True, kw_only=True)
class Flag:
    """What the command line needs to know of one setting; names are without dashes in front.

    `names` are all spellings, the first one is shown; `off` are the spellings that switch a boolean
    off; `count` is None for one value, an integer for exactly so many, "+" for one or more.
    """

    dest: str
    kind: type
    default: Any
    help: str
    names: tuple[str, ...]
    off: tuple[str, ...] = ()
    choices: tuple[str, ...] | None = None
    count: int | str | None = None
    minimum: float | None = None
    above: float | None = None
    maximum: float | None = None
    no_effect: str | None = None

    def shown(self) -> str:
        """The spelling used in messages, for example `--hidden-size`."""
        return "--" + (self.names + self.off)[0]


@dataclass(frozen=True, kw_only=True)
class Section:
    """Base of the sections of the configuration: frozen, built by keyword, checked by `check()`."""

    def check(self) -> None:
        """Raise InputError for a value outside the range or the choices its flag declares."""
        for description in flags(type(self)):
            check_value(description, getattr(self, description.dest))


def flag(default: Any, help: str, *, kind: type | None = None, **metadata: Any) -> Any:
    """A dataclass field with a flag: `kind` is the type of one value (else that of the default).

    Further keywords are fields of Flag; `names` adds spellings to the one made of the field's name.
    """
    kind = kind or (type(default) if default is not None else str)
    return field(default=default, metadata={METADATA_KEY: dict(metadata, kind=kind, help=help)})


def shared(section: type[Section], name: str) -> Any:
    """A field with the default and the flag of field `name` of `section`: one flag fills both."""
    original = section.__dataclass_fields__[name]
    return field(default=original.default, metadata=original.metadata)


def flags(section: type[Section]) -> Iterator[Flag]:
    """The flags of a section in the order of its fields."""
    for item in dataclasses.fields(section):
        if METADATA_KEY not in item.metadata:
            continue
        given = dict(item.metadata[METADATA_KEY])
        name = item.name.replace("_", "-")
        names = tuple(given.pop("names", ()))
        own = () if item.default is True and given["kind"] is bool else (name,)
        yield Flag(dest=item.name, default=item.default, names=own + names, **given)


def check_value(description: Flag, value: Any, shown: str | None = None) -> None:
    """Raise InputError, naming `shown` (else the flag), if a value is outside range or choices."""
    shown = shown or description.shown()
    if value is None:
        return
    values = value if isinstance(value, tuple) else (value,)
    for item in values:
        if description.choices is not None and item not in description.choices:
            raise InputError(f"{shown} {item}: expected one of {', '.join(description.choices)}")
        if description.kind in (int, float) and not isinstance(item, bool):
            _check_range(description, item, shown)


def _check_range(description: Flag, value: float, shown: str) -> None:
    if not math.isfinite(value):
        raise InputError(f"{shown} {value}: expected a finite number")
    if description.minimum is not None and value < description.minimum:
        raise InputError(f"{shown} {value}: expected at least {description.minimum:g}")
    if description.above is not None and value <= description.above:
        raise InputError(f"{shown} {value}: expected more than {description.above:g}")
    if description.maximum is not None and value > description.maximum:
        raise InputError(f"{shown} {value}: expected at most {description.maximum:g}")
