"""What the commands that run in a single process share: help, flags, and errors in one line."""

import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from megatron_zpp.settings.command_line import HELP, Assignment, help_text, read, vocabulary
from megatron_zpp.settings.flag import Section
from zeropp.errors import InputError

FAILED = 1
INTERRUPTED = 130  # 128 + SIGINT, as shells report it

AnySection = TypeVar("AnySection", bound=Section)


def run_command(
    argv: Sequence[str],
    usage: str,
    sections: Sequence[type[Section]],
    run: Callable[[Mapping[str, Assignment]], None],
    *,
    interrupted: str = "stopped",
    log_level: int = logging.WARNING,
) -> int:
    """Read the flags of `sections` from `argv` and call `run` with them; return the exit status.

    `--help` prints `usage` and the flags. An InputError or OSError is printed as a line
    `error: ...`, and the status is 1. After Ctrl-C the line says `interrupted`, and the status is
    130.
    """
    logging.basicConfig(level=log_level, format="%(message)s")
    if any(word in HELP for word in argv):
        print(help_text(usage, sections))
        return 0
    try:
        run(read(argv, vocabulary(sections)))
    except (InputError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print(f"error: {interrupted}", file=sys.stderr)
        return INTERRUPTED
    return 0


def build_section(kind: type[AnySection], typed: Mapping[str, Assignment]) -> AnySection:
    """A section with the flags that were typed and defaults for the others.

    Raises InputError if the values do not fit each other.
    """
    names = kind.__dataclass_fields__.keys() & typed.keys()
    section = kind(**{name: typed[name].value for name in names})
    section.check()
    return section


def is_typed(kind: type[Section], typed: Mapping[str, Assignment]) -> bool:
    """Whether any flag of a section was typed."""
    return not typed.keys().isdisjoint(kind.__dataclass_fields__)
