"""Settings that are flags of a command line, declared by `flag` as fields of a section.

The flags of a run are described by tables beside their sections, such as `run.toml`. A row has the
help of a flag, in one string or several, and further fields of `Flag`; `needs` is what gives the
flag an effect, such as `--load` or `--rope-type yarn`, and `no_effect` are reasons why it has none.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from types import MappingProxyType
from typing import Any

from zeropp import ZeroConfig
from zeropp.errors import InputError
from zeropp.settings import NoEffect, Section, Setting, all_keys, read_toml, setting


@dataclass(frozen=True)
class SameAs:
    """The JSON key that means the same as a flag.

    `to_flag` and `to_json` translate values, `to_json` to None where the JSON cannot express one;
    `index` is the position in a key that holds two values. `key_counts`: beside another value of
    the flag the key's is used; otherwise that is an error.
    """

    key: str
    to_flag: Callable[[Any], Any] = lambda value: value
    to_json: Callable[[Any], Any] = lambda value: value
    index: int | None = None
    key_counts: bool = False

    def flag_value(self, json_value: Any) -> Any:
        """The flag's value that the key's value stands for."""
        return self.to_flag(json_value if self.index is None else json_value[self.index])


@dataclass(frozen=True, kw_only=True)
class Flag(Setting):
    """A flag; names are without the dashes in front.

    `required` flags must be given; `aliases` are further names; `shorthands` are names that take no
    value and the value that each of them stands for; `synonyms` are words for values.
    """

    required: bool = False
    aliases: tuple[str, ...] = ()
    shorthands: Mapping[str, Any] = field(default_factory=dict)
    synonyms: Mapping[str, Any] = field(default_factory=dict)
    same_as: SameAs | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """All names, the one shown first, without shorthands; a boolean's names switch it on."""
        if self.type is bool and self.default is True:
            return self.aliases
        return (self.name.replace("_", "-"), *self.aliases)

    @property
    def shown(self) -> str:
        """The spelling used in messages, for example `--hidden-size`."""
        return f"--{[*self.names, *self.shorthands][0]}"

    def text(self, value: Any) -> str:
        """A value as it is typed."""
        return f"{value:.15g}" if isinstance(value, float) else str(value)

    def assignment(self, value: Any, name: str = "") -> str:
        """For example `--lr 0.0001`, or `--fp16` for one that is true or false."""
        if value is True and self.type is bool:
            return name or self.shown
        values = value if isinstance(value, tuple) else (value,)
        return " ".join([name or self.shown, *(self.text(item) for item in values)])

    def expected(self) -> str:
        """What the value may be, in words, with those of other programs."""
        return ", or ".join([super().expected(), *filter(None, [", ".join(self.synonyms)])])

    def check(self, value: Any, name: str = "") -> None:
        """As for every setting; raises InputError for a flag that is required and not given."""
        if self.required and value is None:
            raise InputError(f"{self.shown} is missing: {self.help}")
        super().check(value, name)


def flag(default: Any, help: str = "", *, kind: Callable[..., Flag] | None = None, **facts) -> Any:
    """Declare a setting with a flag; `facts` are further fields of `Flag`.

    A flag that is the `same_as` a JSON key has no effect for the same reasons, unless it names
    others.
    """
    return setting(kind or make_flag, default, help, **facts)


Conditions = Mapping[str, Callable[[Any], Any] | None]


def flags_in(
    table: str,
    conditions: Conditions = MappingProxyType({}),
    *,
    package: str = __package__,
    **facts: Any,
) -> Callable[..., Any]:
    """Return what declares flags as `flag` does, each described by its row of a table.

    table: a file of the `package`. conditions: when a text of `no_effect` holds (None: always), and
    when one of `needs` is met whose words do not say it. facts: further fields of all these flags.
    """
    return partial(flag, kind=partial(_flag_of_row, package, table, conditions), **facts)


def _flag_of_row(
    package: str,
    table: str,
    conditions: Conditions,
    *,
    name: str,
    help: str,
    no_effect: tuple,
    **facts: Any,
) -> Flag:
    entries = () if help else _read(package, table)[name]
    entries = [entries] if isinstance(entries, str) else entries
    lines = [help, *(entry for entry in entries if isinstance(entry, str))]
    row = {}
    for entry in entries:
        row |= {} if isinstance(entry, str) else entry
    needed = [needs(text, conditions.get(text)) for text in row.pop("needs", ())]
    reasons = [NoEffect(text, conditions[text]) for text in row.pop("no_effect", ())]
    lists = {key: tuple(value) for key, value in row.items() if isinstance(value, list)}
    return make_flag(
        name=name,
        help=" ".join(filter(None, lines)),
        no_effect=(*needed, *reasons, *no_effect),
        **facts,
        **row | lists,
    )


def make_flag(
    *, same_as: str | Mapping | SameAs | None = None, no_effect: tuple, **facts: Any
) -> Flag:
    """Return a flag, whose `same_as` may be a key of the JSON or the fields of a `SameAs`."""
    if isinstance(same_as, str):
        same_as = SameAs(same_as)
    elif isinstance(same_as, Mapping):
        same_as = SameAs(**same_as)
    if same_as is not None and not no_effect:
        no_effect = tuple(
            NoEffect(reason.why, reason.when and (lambda c, when=reason.when: when(c.zero)))
            for reason in all_keys(ZeroConfig)[same_as.key].no_effect
        )
    return Flag(same_as=same_as, no_effect=no_effect, **facts)


@cache
def _read(package: str, table: str) -> Mapping[str, Any]:
    return MappingProxyType(read_toml(package, table))


def needs(flags: str, condition: Callable[[Any], Any] | None = None) -> NoEffect:
    """The reason of a flag that has an effect only if other `flags` make `condition` true.

    The condition takes the complete `Config`. By default it is what `flags` say: "--load", that it
    is given; "--rope-type yarn" and "--fim-rate above 0", its value; either of two after "or".
    """
    is_met = condition or partial(_is_met, flags.partition(";")[0])
    return NoEffect(f"it needs {flags}", when=lambda config: not is_met(config))


def _is_met(flags: str, config: Any) -> bool:
    if " or " in flags:
        return any(_is_met(each, config) for each in flags.split(" or "))
    name, above, wanted = re.fullmatch(r"--(\S+)(?: (above )?(\S+))?", flags).groups()
    name = name.replace("-", "_")
    sections = (each for each in vars(config).values() if not isinstance(each, ZeroConfig))
    value = next(getattr(each, name) for each in sections if hasattr(each, name))
    if above:
        return value > float(wanted)
    return value == wanted if wanted else value is not None and value is not False


def shared(section: type[Section], name: str) -> Any:
    """A field with the default and the flag of field `name` of `section`: one flag fills both."""
    original = section.__dataclass_fields__[name]
    return field(default=original.default, metadata=original.metadata)
