"""Configurations for tests, by dotted key, and the error that one ends with."""

import pytest

from zeropp.errors import InputError
from zeropp.settings.zero_config import ZeroConfig


def nested(values: dict[str, object]) -> dict:
    """{"a.b": 1} as {"a": {"b": 1}}."""
    result: dict = {}
    for dotted, value in values.items():
        *sections, name = dotted.split(".")
        inside = result
        for section in sections:
            inside = inside.setdefault(section, {})
        inside[name] = value
    return result


def error_of(source: object) -> str:
    with pytest.raises(InputError) as caught:
        ZeroConfig.from_json(source)
    return str(caught.value)
