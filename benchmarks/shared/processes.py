"""Processes of this project's programs, all of which can be killed at once."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType, MappingProxyType

from benchmarks.shared.result import ROOT

LAUNCHER = "import sys; from zeropp.ranks.launcher import main; sys.exit(main())"
LAUNCH = (sys.executable, "-c", LAUNCHER)
ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def start(
    command: Sequence[str],
    log: Path | None,
    folder: Path = ROOT,
    variables: Mapping[str, str] = MappingProxyType({}),
    pass_fds: Sequence[int] = (),
    *,
    appends: bool = False,
) -> subprocess.Popen:
    """Start a command with one thread in a session of its own, which Ctrl-C does not reach.

    What it prints begins the file `log`, or `appends` to it, or goes to standard error if there is
    none. `variables` are added to the environment, where this clone is on Python's path. `pass_fds`
    stay open in the process.
    """
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    with contextlib.ExitStack() as stack:
        mode = "ab" if appends else "wb"
        output = sys.stderr if log is None else stack.enter_context(open(log, mode))
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", **variables},
            pass_fds=pass_fds,
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


def exit_on_signals() -> None:
    """Turn signals that end this process into SystemExit, so that clean-up runs."""
    for number in ENDING_SIGNALS:
        signal.signal(number, _exit)


def _exit(number: int, frame: FrameType | None) -> None:
    """Exit as after the signal; ignore further signals, so that clean-up is not interrupted."""
    for ignored in ENDING_SIGNALS:
        signal.signal(ignored, signal.SIG_IGN)
    print(f"\nstopped by {signal.Signals(number).name}", file=sys.stderr)
    sys.exit(128 + number)
