"""The exception for mistakes that a user can correct (flags, files, settings), and error texts."""

import traceback
from collections.abc import Callable, Sequence


class InputError(ValueError):
    """Says what was given, what was expected and what to do; shown without a traceback."""


class RefusedCall(InputError, AssertionError):
    """A call that DeepSpeed refuses by an assertion, which its programs may catch."""


class Unavailable(InputError, NotImplementedError):
    """A use of something that is not available here."""


class NetworkError(InputError):
    """The ranks cannot meet. Each machine shows it, as no rank can tell the others."""


def picklable(error: Exception, other: Callable[[str], Exception] = RuntimeError) -> Exception:
    """Return an error that says the same and can be sent to another process.

    An InputError and an OSError stay what they are; of any other error, `other(its traceback)`.
    """
    if type(error) in (InputError, RefusedCall, Unavailable):
        return type(error)(str(error))
    if isinstance(error, OSError) and error.errno is not None:
        return OSError(error.errno, error.strerror, error.filename)
    return other("".join(traceback.format_exception(error)))


def unwritable(flag: str, folder: object, reason: str) -> InputError:
    """Return the error for a `folder`, given by `flag`, in which nothing can be saved."""
    return InputError(f"{flag} {folder} cannot be written ({reason}): name a folder that can")


def first_few(names: Sequence[str], most: int = 6) -> str:
    """Return the first names and how many more there are, for an error message."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")


def first_lines(lines: Sequence[str], most: int = 40) -> str:
    """Return the first lines, indented for an error message, and how many more there are."""
    more = [f"and {len(lines) - most} more"] if len(lines) > most else []
    return "\n  ".join([*lines[:most], *more])
