"""How a command runs: it reads its flags, answers `--help`, and reports an error as one line."""

import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from megatron_zpp.settings.command_line import HELP, Assignment, help_text, read, vocabulary
from megatron_zpp.settings.flag import Section
from zeropp.errors import InputError
from zeropp.ranks.topology import Environment

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
    """Call `run` with the flags of `sections` typed in `argv`; return the exit status.

    `--help` prints `usage` and the flags. An InputError or OSError is printed to standard error as
    a line `error: ...`, and the status is 1. After Ctrl-C the line says `interrupted`, and the
    status is 130.
    """
    logging.basicConfig(level=log_level, format="%(message)s")
    if _asks_for_help(argv):
        print(help_text(usage, sections))
        return 0
    try:
        run(read(argv, vocabulary(sections)))
    except (InputError, OSError) as error:
        _print_error(error)
        return FAILED
    except KeyboardInterrupt:
        _print_error(interrupted)
        return INTERRUPTED
    return 0


def run_on_ranks(
    argv: Sequence[str],
    usage: str,
    sections: Sequence[type[Section]],
    run: Callable[..., None],
) -> int:
    """Call `run(environment, *sections)` with the values of the flags; return the exit status.

    For commands that torchrun or zeropp may start on several ranks: every rank runs the command,
    and only rank 0 logs and prints errors. Otherwise like `run_command`, but silent after Ctrl-C.
    """
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    if _asks_for_help(argv):
        print(help_text(usage, sections))
        return 0
    environment = Environment(rank=0)  # reports an error in the variables themselves
    try:
        environment = Environment.read()
        logging.getLogger().setLevel(logging.WARNING if environment.rank else logging.INFO)
        typed = read(argv, vocabulary(sections))
        run(environment, *(build_section(section, typed) for section in sections))
    except (InputError, OSError) as error:
        if environment.rank == 0:
            _print_error(error)
        return FAILED
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0


def build_section(kind: type[AnySection], typed: Mapping[str, Assignment]) -> AnySection:
    """A section with the flags that were typed and defaults for the others.

    Raises InputError for a value out of range or values that contradict each other.
    """
    names = kind.__dataclass_fields__.keys() & typed.keys()
    section = kind(**{name: typed[name].value for name in names})
    section.check()
    return section


def is_typed(kind: type[Section], typed: Mapping[str, Assignment]) -> bool:
    """Whether any flag of a section was typed."""
    return not typed.keys().isdisjoint(kind.__dataclass_fields__)


def require_writable(path: str, flag: str) -> None:
    """Raise InputError if no file can be written at `path`, before any time is spent computing."""
    file = Path(path)
    if file.is_dir():
        raise InputError(f"{flag} {path}: is a folder; name a file")
    if not file.parent.is_dir():
        raise InputError(f"{flag} {path}: there is no folder {file.parent}")
    if not os.access(file.parent, os.W_OK):
        raise InputError(f"{flag} {path}: nothing can be written in {file.parent}")


def _asks_for_help(argv: Sequence[str]) -> bool:
    return any(word in HELP for word in argv)


def _print_error(message: object) -> None:
    print(f"error: {message}", file=sys.stderr)
