"""The table of families, `families.toml`: a row for each `model_type` that our GPT can be."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from megatron_zpp.interchange.families import layers, rope, settings
from megatron_zpp.interchange.families.family import Family, FamilySetting
from megatron_zpp.interchange.families.names import CAPABILITIES
from megatron_zpp.interchange.families.rope import Rotary
from megatron_zpp.interchange.families.settings import Choice, Number, with_like
from zeropp.settings import modules_of, read_toml

NULL = "null"  # which TOML does not have
TIED = ("opposite", "tie_word_embeddings", False, "untie_embeddings_and_output_weights")


def why_unsupported(model_type: Any) -> str | None:
    """Return what another type of model has and our GPT does not, by `unsupported.toml`."""
    reasons = read_toml(__package__, "unsupported.toml").items()
    return next((why for why, types in reasons if model_type in types), None)


def _row(rows: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return a row with what it does not say itself, and all its defaults."""
    row, like = dict(rows[name]), rows[name].get("like")
    if like is None:
        return row
    above = _row(rows, row.pop("like"))
    return above | row | {"defaults": above.get("defaults", {}) | row.get("defaults", {})}


def _calls(settings: Sequence[Any], lists: Mapping[str, Sequence[Any]]) -> Iterator[Sequence[Any]]:
    """Yield a kind and its arguments for each setting, those of named lists in their place."""
    for each in settings:
        if isinstance(each, str):
            yield from _calls(lists[each], lists)
        else:
            yield each


def _kind(name: str) -> Callable[..., FamilySetting]:
    """Return the function or class that a row means, as RotaryByLayer by `rotary_by_layer`."""
    names = name, "".join(part.capitalize() for part in name.split("_"))
    modules = (settings, layers, rope, *modules_of("families", CAPABILITIES))
    return next(
        getattr(module, each) for module in modules for each in names if hasattr(module, each)
    )


def _setting(
    kind: str, arguments: Sequence[Any], renamed: Mapping[str, str], defaults: Mapping[str, Any]
) -> FamilySetting:
    """Return a setting, with another name and the default of its key, if there are such."""
    named: dict[str, Any] = {}
    for each in arguments:
        named |= each if isinstance(each, dict) else {}
    setting = _kind(kind)(*(each for each in arguments if not isinstance(each, dict)), **named)
    if isinstance(setting, Rotary):
        return replace(setting, default_scaling=defaults.get("rope_scaling"))
    if not isinstance(setting, Number | Choice):
        return setting
    key = renamed.get(setting.key, setting.key)
    return replace(setting, key=key, default=defaults.get(key, setting.default))


def _family(row_name: str, table: Mapping[str, Any]) -> Family:
    row = _row(table["family"], row_name)
    defaults, renamed = row.pop("defaults"), row.pop("renamed", {})
    without = row.pop("without", [])
    calls = (*_calls(row.pop("settings"), table["settings"]), TIED)
    marks = {
        key: tuple(None if value == NULL else value for value in values)
        for key, values in row.pop("marks", {}).items()
    }
    return Family(
        name=row.pop("name", row_name),
        names_of=table["family"][row_name].get("names_of", row_name),
        fields=with_like(table["fields"] | {"": row.pop("fields", {})}, ""),
        settings=tuple(
            _setting(kind, arguments, renamed, defaults)
            for kind, *arguments in calls
            if not arguments or arguments[0] not in without
        ),
        vocab_size=defaults["vocab_size"],
        marks=marks,
        **{key: value for key, value in row.items() if key != "names_of"},
    )


def _families() -> tuple[Family, ...]:
    table = read_toml(__package__, "families.toml")
    return tuple(_family(name, table) for name in table["family"])


FAMILIES = _families()
