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


@pytest.mark.parametrize(
    "text",
    ["0", "-1", "", "[2,0,0,0]", "[0,1]*-2", "[0,1]*10**9", "[0]*(1+1)", "x", "[x]", "[True]*4",
     "__import__('os')", "(" * 9999, "1.5", "[0,1"],
)  # fmt: skip
def test_what_is_no_pattern(text: str) -> None:
    with pytest.raises(InputError, match="--flag .*: expected a whole number above 0, or a list"):
        marks_of(text, 4, "--flag")


def test_a_list_of_another_length() -> None:
    with pytest.raises(InputError, match=r"--flag \[0,1\]: has 2 numbers, but there are 4 layers"):
        marks_of("[0,1]", 4, "--flag")


@pytest.mark.parametrize("text", ["127,0", "(127,0)", "127, 0"])
def test_window(text: str) -> None:
    assert parse_window(text) == 128
    assert parse_window(window_text(128)) == 128


@pytest.mark.parametrize(
    ("text", "message"),
    [("127", "expected the tokens"), ("a,0", "expected"), ("-1,0", "expected"), ("8,8", "causal")],
)
def test_what_is_no_window(text: str, message: str) -> None:
    with pytest.raises(InputError, match=f"--window-size .*{message}"):
        parse_window(text)
