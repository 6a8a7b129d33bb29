"""A rank that is a fork of the launcher, and behaves as the new program that it stands for."""

import io
import os
import signal
import socket
import sys
from collections.abc import Mapping
from typing import TextIO

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
    rank_main.set_name(f"rank {variables['RANK']}")
    sys.stdout, sys.stderr = _own_stream(sys.stdout, 1), _own_stream(sys.stderr, 2)
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


def _own_stream(stream: TextIO, descriptor: int) -> TextIO:
    """Return a stream that writes whole lines, with the encoding of another one."""
    raw = open(descriptor, "wb", closefd=False)
    return io.TextIOWrapper(raw, stream.encoding, stream.errors, line_buffering=True)
