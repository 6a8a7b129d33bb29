"""One rank of `zeropp`: runs a script or module as Python would, and ends with its launcher.

Started by path and written with the standard library alone, so that a rank imports nothing that its
script does not need.
"""

import ctypes
import os
import runpy
import signal
import sys

SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of linux/prctl.h


def main(arguments: list[str]) -> None:
    """Run `arguments`: launcher's process id, cores per rank (0: all), local rank, then either a
    script and its arguments or `--module`, a module's name and its arguments."""
    launcher, num_cores, local_rank = (int(text) for text in arguments[:3])
    _end_with(launcher)
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


def _end_with(launcher: int) -> None:
    """Get SIGTERM when the launcher is gone, even by SIGKILL: a rank can still save then."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGTERM)
    if os.getppid() != launcher:
        sys.exit("error: the launcher ended before this rank started")


def _pin_to_cores(num_cores: int, local_rank: int) -> None:
    """Use only this rank's cores; threads and child processes inherit that."""
    if hasattr(os, "sched_setaffinity"):
        first = num_cores * local_rank
        usable = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, usable[first : first + num_cores])


if __name__ == "__main__":
    main(sys.argv[1:])
