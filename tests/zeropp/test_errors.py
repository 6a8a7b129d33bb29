"""Error messages that list many things are cut off, and say how much is left out."""

from zeropp.errors import first_few, first_lines


def test_first_few() -> None:
    assert first_few(["a", "b"]) == "a, b"
    assert first_few(["a", "b", "c"], most=2) == "a, b and 1 more"


def test_first_lines() -> None:
    assert first_lines(["a", "b"]) == "a\n  b"
    assert first_lines(["a", "b", "c", "d"], most=2) == "a\n  b\n  and 2 more"
