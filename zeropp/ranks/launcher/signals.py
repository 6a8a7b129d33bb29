"""Signals that a launcher waits for: those that end its ranks, and the end of a child."""

import signal
import socket

ENDING = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM)
LEAST_SECONDS = 0.01  # of a wait


class StoppedBySignal(Exception):
    """The signal `number` ended the ranks, which have had time to save."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.number = number


class Signals:
    """In its block signals do nothing but end `wait`; only the main thread may enter it."""

    def __enter__(self) -> "Signals":
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._descriptor = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        self._handlers = {number: signal.signal(number, _note) for number in _waited_for()}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._descriptor)
        self._reader.close()
        self._writer.close()

    def wait(self, seconds: float | None) -> list[int]:
        """Return the signals that have come; wait for one, but for `seconds` at most."""
        self._reader.settimeout(None if seconds is None else max(seconds, LEAST_SECONDS))
        try:
            return list(self._reader.recv(len(signal.valid_signals())))
        except TimeoutError:
            return []


def reset_signals() -> None:
    """Let signals do in a forked process what they do in a new program."""
    signal.set_wakeup_fd(-1)
    for number in _waited_for():
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _waited_for() -> list[signal.Signals]:
    """Return the signals, without SIGHUP where nohup lets programs go on after it."""
    numbers = (*ENDING, signal.SIGCHLD)
    ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return [number for number in numbers if number != signal.SIGHUP or not ignored]


def _note(*_: object) -> None:
    """Do nothing: the number is written to the socket."""
