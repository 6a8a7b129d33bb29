"""How a command runs: it reads its flags, answers `--help`, and reports an error as one line."""

import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import TYPE_CHECKING

from megatron_zpp.settings.command_line import (
    HELP,
    build_section,
    help_text,
    read,
    vocabulary,
)
from megatron_zpp.settings.config import TokenizerConfig
from megatron_zpp.settings.flag import Flag, Section
from zeropp.errors import InputError, NetworkError
from zeropp.ranks import Environment
from zeropp.settings import no_effect_line

if TYPE_CHECKING:
    from megatron_zpp.checkpoint.open_model import OpenedModel

INTERCHANGE = "megatron_zpp.interchange"  # imported where it is needed: it may be left out
FAILED = 1
INTERRUPTED = 130  # 128 + SIGINT, as shells report it

log = logging.getLogger("megatron_zpp")


def run_command(
    argv: Sequence[str],
    usage: str,
    sections: Sequence[type[Section]],
    run: Callable[..., None],
    *,
    joins_ranks: bool = False,
    interrupted: str = "stopped",
    log_level: int = logging.WARNING,
    no_effect: Mapping[str, str] = MappingProxyType({}),
    idle: Sequence[Flag] = (),
) -> int:
    """Call `run(*sections)` with the values of the flags typed in `argv`; return the exit status.

    `--help` prints `usage` and the flags. An InputError or OSError is printed to standard error as
    a line `error: ...`, and the status is 1. After Ctrl-C the line says `interrupted`, or what the
    KeyboardInterrupt says, and the status is 130. `no_effect` gives reasons why flags of these
    sections have no effect here, and `idle` are further flags, which never have any.

    joins_ranks: torchrun or zeropp may start the command on several ranks. Then every rank calls
    `run(environment, *sections)`, only rank 0 logs and prints errors (of each machine the first one
    that they cannot meet), and Ctrl-C prints nothing.
    """
    logging.basicConfig(level=log_level, format="%(message)s")
    if any(word in HELP for word in argv):
        print(help_text(usage, sections, idle))
        return 0
    environment = Environment(rank=0)  # reports an error in the variables themselves
    try:
        if joins_ranks:
            environment = Environment.read()
            run = partial(run, environment)
            logging.getLogger().setLevel(logging.WARNING if environment.rank else logging.INFO)
        typed = read(argv, vocabulary(sections, idle))
        ignored = {
            str(assignment): reason
            for name, assignment in typed.items()
            if (reason := assignment.flag.why_ignored or no_effect.get(name))
        }
        if ignored:
            log.warning("%s", no_effect_line(ignored))
        run(*(build_section(section, typed) for section in sections))
    except (InputError, OSError) as error:
        keeps_apart = isinstance(error, NetworkError)  # ranks cannot tell each other
        if (environment.local_rank if keeps_apart else environment.rank) == 0:
            _print_error(error)
        return FAILED
    except KeyboardInterrupt as interruption:
        if not joins_ranks:
            _print_error(str(interruption) or interrupted)
        return INTERRUPTED
    return 0


def find_part(package: str, module: str) -> ModuleType | None:
    """Import a module of a package that may be left out of an installation; None without it."""
    try:
        return import_module(f"{package}.{module}")
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith(package):
            raise
        return None


def load_part(package: str, needed_by: str, module: str) -> ModuleType:
    """Import a module as `find_part` does.

    Raises InputError, which names what it is `needed_by`, if the package is not there.
    """
    part = find_part(package, module)
    if part is None:
        raise InputError(f"{needed_by} needs {package}, which is not installed")
    return part


def open_model(
    folder: Path | str, tokenizer_config: TokenizerConfig | None = None
) -> "OpenedModel":
    """Open a model in any format: what training and text are given.

    Without `megatron_zpp.interchange`, which may be left out of an installation, it opens our
    checkpoints, and raises InputError for others.
    """
    part = find_part(INTERCHANGE, "open_model")
    if part is not None:
        return part.open_model(folder, tokenizer_config)
    checkpoints = import_module("megatron_zpp.checkpoint.open_model")
    return checkpoints.open_checkpoint(folder, tokenizer_config)


def require_writable(path: str, flag: str) -> None:
    """Raise InputError if no file can be written at `path`, before any time is spent computing."""
    file = Path(path)
    if file.is_dir():
        raise InputError(f"{flag} {path}: is a folder; name a file")
    if not file.parent.is_dir():
        raise InputError(f"{flag} {path}: there is no folder {file.parent}")
    if not os.access(file.parent, os.W_OK):
        raise InputError(f"{flag} {path}: nothing can be written in {file.parent}")


def _print_error(message: object) -> None:
    print(f"error: {message}", file=sys.stderr)
