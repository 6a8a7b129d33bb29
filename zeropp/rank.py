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
    """Run the script `arguments[1]` with the rest; `arguments[0]` is the launcher's process id."""
    launcher, script = int(arguments[0]), arguments[1]
    _end_with(launcher)
    sys.argv = arguments[1:]
    sys.path[0] = os.path.dirname(os.path.abspath(script))
    runpy.run_path(script, run_name="__main__")


def _end_with(launcher: int) -> None:
    """Get SIGTERM when the launcher is gone, even by SIGKILL: a rank can still save then."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGTERM)
    if os.getppid() != launcher:
        sys.exit("error: the launcher ended before this rank started")


if __name__ == "__main__":
    main(sys.argv[1:])
