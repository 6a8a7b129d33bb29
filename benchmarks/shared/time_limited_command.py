"""A command with a time limit, whose output goes to files and whose children end with it."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SECONDS_TO_END = 10.0  # between SIGINT, at which pytest sums up, and SIGKILL
INTERRUPTED = -signal.SIGINT  # the status where this process was interrupted meanwhile
CANNOT_START = 127  # the shell's exit status for a command that cannot be started


@dataclass(frozen=True, kw_only=True)
class CommandResult:
    """Exit status, duration, and both outputs of a command.

    The status is None if the time was up, and `INTERRUPTED` if this process was interrupted.
    """

    status: int | None
    seconds: float
    out: str
    err: str


def run_with_limit(
    command: Sequence[str], environment: Mapping[str, str], log: Path, limit: float
) -> CommandResult:
    """Run a command in the clone for at most `limit` seconds; output goes to `log`.out and .err.

    A command that cannot be started has status 127, as in a shell.
    """
    started = time.monotonic()
    paths = log.with_suffix(".out"), log.with_suffix(".err")
    with paths[0].open("wb") as out, paths[1].open("wb") as err:
        try:
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=environment,
                stdout=out,
                stderr=err,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError as error:
            err.write(f"{error}\n".encode())
            status = CANNOT_START
        else:
            status = _wait(process, limit)
    seconds = time.monotonic() - started
    out_text, err_text = (path.read_text(errors="replace") for path in paths)
    return CommandResult(status=status, seconds=seconds, out=out_text, err=err_text)


def _wait(process: subprocess.Popen, limit: float) -> int | None:
    """The exit status; None or `INTERRUPTED` if the process and all it started had to be ended."""
    try:
        return process.wait(limit)
    except subprocess.TimeoutExpired:
        status = None
    except KeyboardInterrupt:
        status = INTERRUPTED
    process.send_signal(signal.SIGINT)
    try:
        process.wait(SECONDS_TO_END)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        pass
    with contextlib.suppress(ProcessLookupError):  # what it has started may be left
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    return status
