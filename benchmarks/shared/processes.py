"""Launches of this project's programs whose processes can all be killed at once."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

from benchmarks.shared.result import ROOT

LAUNCHER = "import sys; from zeropp.ranks.launcher import main; sys.exit(main())"
LAUNCH = (sys.executable, "-c", LAUNCHER)


def start(command: list[str], log: Path, folder: Path) -> subprocess.Popen:
    """Start a command in a process group of its own; what it prints goes to `log`."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with open(log, "wb") as output:
        return subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env=environment,
            start_new_session=True,
        )


def kill_all(launcher: subprocess.Popen) -> None:
    """SIGKILL the launcher and all its ranks at once, as a power cut would."""
    signal_all(launcher, signal.SIGKILL)
    launcher.wait()


def signal_all(launcher: subprocess.Popen, number: int) -> None:
    """Send a signal to the launcher and all its ranks."""
    for pid in [launcher.pid, *descendants(launcher.pid)]:
        with contextlib.suppress(ProcessLookupError):  # a fork server ends with its program
            os.kill(pid, number)


def descendants(pid: int) -> list[int]:
    """The processes below one, its children first."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in children] + [
        below for child in children for below in descendants(int(child))
    ]
