"""Frequencies, lists and windows of flags that say something of some layers."""

import pytest

from megatron_zpp.settings.gpt.layer_pattern import (
    marks_of,
    parse_window,
    pattern_text,
    window_text,
)
from zeropp.errors import InputError


@pytest.mark.parametrize(
    ("text", "marks"),
    [
        ("1", [1, 1, 1, 1]),
        ("2", [0, 1, 0, 1]),
        ("4", [0, 0, 0, 1]),
        ("5", [0, 0, 0, 0]),
        ("[0,1,1,0]", [0, 1, 1, 0]),
        ("[0, 1]*2", [0, 1, 0, 1]),
        ("([0]*1+[1]*1)*2", [0, 1, 0, 1]),
        ("[1]+[0]*3", [1, 0, 0, 0]),
    ],
)
def test_marks(text: str, marks: list[int]) -> None:
    assert marks_of(text, 4, "--flag") == tuple(map(bool, marks))
    shortest = pattern_text(marks)
    assert marks_of(shortest, 4, "--flag") == tuple(map(bool, marks))
    assert len(shortest) <= len(text)


def test_a_frequency_may_count_the_layers_without_a_mark() -> None:
    assert marks_of("3", 6, "", nth=False) == (True, True, False, True, True, False)
    assert marks_of("[0,1]*3", 6, "", nth=False) == (False, True) * 3
    assert pattern_text((True, True, False) * 2, nth=False) == "3"


@pytest.mark.parametrize("text", ["127,0", "(127,0)", "127, 0"])
def test_window(text: str) -> None:
    assert parse_window(text) == 128
    assert parse_window(window_text(128)) == 128


def test_more_brackets_than_python_reads() -> None:
    with pytest.raises(InputError, match="--flag .*: expected a whole number above 0, or a list"):
        marks_of("(" * 9999, 4, "--flag")
