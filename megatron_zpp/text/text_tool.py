"""What tools around a text model have in common: flags, help, errors as a person reads them.

Started by torchrun or zeropp, every rank runs the tool; only the first one speaks.
"""

import logging
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from megatron_zpp.settings.command_line import HELP, help_text, read, vocabulary
from megatron_zpp.settings.flag import Section
from zeropp.errors import InputError
from zeropp.ranks.topology import Environment

INTERRUPTED = 130  # as shells count: 128 + SIGINT


def run_tool(
    argv: Sequence[str],
    usage: str,
    sections: Sequence[type[Section]],
    run: Callable[..., None],
) -> int:
    """Call `run(environment, *sections as typed)`; returns the exit status.

    What a person can mend becomes a line `error: ...` on standard error, and status 1.
    """
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    if any(word in HELP for word in argv):
        print(help_text(usage, sections))
        return 0
    environment = Environment(rank=0)
    try:
        environment = Environment.read()
        logging.getLogger().setLevel(logging.WARNING if environment.rank else logging.INFO)
        typed = read(argv, vocabulary(sections))
        run(environment, *(_section(kind, typed) for kind in sections))
    except (InputError, OSError) as error:
        if environment.rank == 0:
            print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0


def require_place(path: str, flag: str) -> None:
    """Raise InputError where no file can be written, before there is work to lose."""
    place = Path(path)
    if place.is_dir():
        raise InputError(f"{flag} {path}: is a folder; name a file")
    if not place.parent.is_dir():
        raise InputError(f"{flag} {path}: there is no folder {place.parent}")
    if not os.access(place.parent, os.W_OK):
        raise InputError(f"{flag} {path}: nothing can be written in {place.parent}")


def _section(kind: type[Section], typed: dict[str, Any]) -> Section:
    names = [entry.name for entry in fields(kind) if entry.name in typed]
    section = kind(**{name: typed[name].value for name in names})
    section.check()
    return section
