"""What the commands around a text model share: flags, help, and errors as one line.

Started by torchrun or zeropp, every rank runs the command; only rank 0 prints.
"""

import logging
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from megatron_zpp.commands.run_command import FAILED, INTERRUPTED, build_section
from megatron_zpp.settings.command_line import HELP, help_text, read, vocabulary
from megatron_zpp.settings.flag import Section
from zeropp.errors import InputError
from zeropp.ranks.topology import Environment


def run_on_ranks(
    argv: Sequence[str],
    usage: str,
    sections: Sequence[type[Section]],
    run: Callable[..., None],
) -> int:
    """Call `run(environment, *sections)` with the parsed flags; returns the exit status.

    InputError and OSError become a line `error: ...` on standard error, and status 1.
    """
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    if any(word in HELP for word in argv):
        print(help_text(usage, sections))
        return 0
    environment = Environment(rank=0)
    try:
        environment = Environment.read()
        logging.getLogger().setLevel(logging.WARNING if environment.rank else logging.INFO)
        assignments = read(argv, vocabulary(sections))
        run(environment, *(build_section(section, assignments) for section in sections))
    except (InputError, OSError) as error:
        if environment.rank == 0:
            print(f"error: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0


def require_writable(path: str, flag: str) -> None:
    """Raise InputError if no file can be written at `path`, before there is work to lose."""
    file = Path(path)
    if file.is_dir():
        raise InputError(f"{flag} {path}: is a folder; name a file")
    if not file.parent.is_dir():
        raise InputError(f"{flag} {path}: there is no folder {file.parent}")
    if not os.access(file.parent, os.W_OK):
        raise InputError(f"{flag} {path}: nothing can be written in {file.parent}")
