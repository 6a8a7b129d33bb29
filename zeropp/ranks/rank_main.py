"""One rank of `zeropp`: runs a script as `python script` would, and ends when its launcher ends.

Started by path and with the standard library alone, so that a script pays only for what it imports.
"""

import ctypes
import os
import runpy
import signal
import sys

SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of linux/prctl.h


def main(arguments: list[str]) -> None:
    """Run a script; given are the launcher's process id, how many cores to keep to (0: all), this
    rank's number on the machine, and the command."""
    launcher, share, number = (int(text) for text in arguments[:3])
    _end_with(launcher)
    if share:
        _keep_to(share, number)
    sys.argv, script = arguments[3:], arguments[3]
    sys.path[0] = os.path.dirname(os.path.abspath(script))
    runpy.run_path(script, run_name="__main__")


def _end_with(launcher: int) -> None:
    """Get SIGTERM when the launcher is gone, even by SIGKILL: a rank can still save then."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGTERM)
    if os.getppid() != launcher:
        sys.exit("error: the launcher ended before this rank started")


def _keep_to(share: int, number: int) -> None:
    """Stay on part `number` of the cores; threads and workers to come inherit that."""
    if hasattr(os, "sched_setaffinity"):
        first = share * number
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[first : first + share])


if __name__ == "__main__":
    main(sys.argv[1:])
