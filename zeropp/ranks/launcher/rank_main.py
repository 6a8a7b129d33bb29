"""The main program of a rank that `zeropp` starts: it runs a script or module as Python would.

It is started by its path and uses the standard library only, so that a rank imports nothing that
its script does not need.
"""

import ctypes
import os
import runpy
import signal
import sys

SET_PARENT_DEATH_SIGNAL, SET_NAME = 1, 15  # PR_SET_PDEATHSIG and PR_SET_NAME of linux/prctl.h


def main(arguments: list[str]) -> None:
    """Run a script or module.

    `arguments` are the process id of the launcher, the number of cores per rank (0: all), the local
    rank, and then a script with its arguments, or `--module` and a module with its arguments.
    """
    launcher, num_cores, local_rank = (int(text) for text in arguments[:3])
    sys.stdout.reconfigure(line_buffering=True)  # ranks that share a pipe never mix their lines
    _end_with_launcher(launcher)
    if num_cores:
        _pin_to_cores(num_cores, local_rank)
    if arguments[3] == "--module":
        sys.argv = arguments[4:]
        sys.path[0] = os.getcwd()
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments[3:]
        sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
        runpy.run_path(sys.argv[0], run_name="__main__")


def _end_with_launcher(launcher: int) -> None:
    """Receive SIGTERM when the launcher ends, even by SIGKILL, so that the rank can still save."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGTERM)
    if os.getppid() != launcher:
        sys.exit("error: the launcher ended before this rank started")


def set_name(name: str) -> None:
    """Give this process a name that `top` shows, of 15 characters at most."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(SET_NAME, name.encode(), 0, 0, 0)


def _pin_to_cores(num_cores: int, local_rank: int) -> None:
    """Use only the cores of this rank; threads and child processes inherit the setting."""
    if hasattr(os, "sched_setaffinity"):
        first = num_cores * local_rank
        usable = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, usable[first : first + num_cores])


if __name__ == "__main__":
    main(sys.argv[1:])
