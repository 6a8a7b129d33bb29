"""The exception for mistakes that a user can correct: bad flags, bad files, bad settings."""

from collections.abc import Sequence


class InputError(ValueError):
    """Says what was given, what was expected and what to do; shown without a traceback."""


def first_few(names: Sequence[str], most: int = 6) -> str:
    """Return the first names and how many more there are, for an error message."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")


def first_lines(lines: Sequence[str], most: int = 40) -> str:
    """Return the first lines, indented for an error message, and how many more there are."""
    more = [f"and {len(lines) - most} more"] if len(lines) > most else []
    return "\n  ".join([*lines[:most], *more])
