"""A rank that is a fork of the launcher, and behaves as the new program that it stands for."""

import io
import os
import signal
import socket
import sys
from collections.abc import Mapping

from zeropp.ranks.launcher import rank_main
from zeropp.ranks.launcher.signals import reset_signals
from zeropp.ranks.topology import use_variables


def run_forked(arguments: list[str], variables: Mapping[str, str], listener: socket.socket) -> None:
    """Run what `rank_main` runs, in a process that `multiprocessing` has forked.

    `listener` is the launcher's alone.
    """
    os.setsid()
    listener.close()
    reset_signals()
    use_variables(variables)
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        setattr(sys, name, _unbuffered(descriptor))
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # ranks that share its state would draw the same
    try:
        rank_main.main(arguments)
    except KeyboardInterrupt:
        sys.excepthook(*sys.exc_info())
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except Exception:  # noqa: BLE001  (as Python ends a program)
        sys.excepthook(*sys.exc_info())
        sys.exit(1)


def _unbuffered(descriptor: int) -> io.TextIOWrapper:
    """Return a stream as `python -u` opens it."""
    old = sys.stdout if descriptor == 1 else sys.stderr
    raw = open(descriptor, "wb", 0, closefd=False)
    return io.TextIOWrapper(raw, old.encoding, old.errors, write_through=True)
