"""A command with a time limit: its outputs go to files, and its end takes all it started along."""

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

GRACE = 5.0  # seconds between the request to end and the end


@dataclass(frozen=True, kw_only=True)
class Done:
    """What a command did; `status` is None if its time was up."""

    status: int | None
    seconds: float
    out: str
    err: str


def run_limited(
    command: Sequence[str], folder: Path, environment: Mapping[str, str], log: Path, limit: float
) -> Done:
    """Run in `folder` for at most `limit` seconds; `log`.out and `log`.err hold what it says.

    A command that cannot be started has the shell's status 127.
    """
    started = time.monotonic()
    paths = log.with_suffix(".out"), log.with_suffix(".err")
    with paths[0].open("wb") as out, paths[1].open("wb") as err:
        try:
            process = subprocess.Popen(
                command, cwd=folder, env=environment, stdout=out, stderr=err,
                stdin=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            err.write(f"{error}\n".encode())
            status = 127
        else:
            status = _wait(process, limit)
    seconds = time.monotonic() - started
    texts = [path.read_text(errors="replace") for path in paths]
    return Done(status=status, seconds=seconds, out=texts[0], err=texts[1])


def _wait(process: subprocess.Popen, limit: float) -> int | None:
    try:
        return process.wait(limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(GRACE)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return None
