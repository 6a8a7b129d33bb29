"""Why a run ends before its last iteration: a signal, a file, an iteration, or the clock.

With `--exit-signal-handler`, SIGTERM, SIGINT and `--exit-signal` are only recorded; after each
iteration the loop asks whether any rank has received one, and all ranks save and stop together.
Without it they end the process at once.
"""

import os
import signal
import time
from contextlib import AbstractContextManager
from types import FrameType

from megatron_zpp.parallel.mesh import Ranks
from megatron_zpp.settings.config import TrainingConfig

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Interrupted(BaseException):
    """A signal asked this process to end now; `code` is the exit status a shell gives for it."""

    def __init__(self, number: int) -> None:
        super().__init__(number)  # what pickling passes on: ranks send each other their errors
        self.number = number
        self.code = 128 + number

    def __str__(self) -> str:
        return f"stopped by {signal.Signals(self.number).name}"


class Stopping(AbstractContextManager):
    """Decides when to stop early, the same on every rank; a context that handles the signals."""

    def __init__(self, config: TrainingConfig) -> None:
        self._config = config
        self._received: int | None = None
        self.interruption: Interrupted | None = None  # raised, maybe caught by others
        self._immediate = not config.exit_signal_handler
        own = () if self._immediate else (signal.Signals[config.exit_signal],)
        self._signals = tuple({*SIGNALS, *own})
        self._started = time.monotonic()
        self._handlers = []

    def __enter__(self) -> "Stopping":
        self._handlers = [signal.signal(number, self._receive) for number in self._signals]
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in zip(self._signals, self._handlers, strict=True):
            signal.signal(number, handler)

    def reason(self, iteration: int, ranks: Ranks, *, aligned: bool = True) -> str | None:
        """Why to save and stop after `iteration`, or None.

        A collective if the answer depends on signals, files or clocks, which differ between ranks.
        Replicas stop where all of them are `aligned`, at the same step.
        """
        config = self._config
        if config.exit_interval and iteration % config.exit_interval == 0:
            return f"--exit-interval {config.exit_interval}"
        path = config.kill_switch_path
        never = (
            not config.exit_signal_handler and (config.exit_duration_in_mins, path) == (None,) * 2
        )
        if never or not aligned:
            return None
        time_is_up = (
            config.exit_duration_in_mins is not None
            and time.monotonic() - self._started > 60 * config.exit_duration_in_mins
        )
        is_killed = path is not None and os.path.exists(path)
        num_signals, num_clocks, num_files = ranks.sum_over_replicas(
            float(self._received is not None), float(time_is_up), float(is_killed)
        )
        if num_signals:
            return "a signal (--exit-signal-handler)"
        if num_files:
            return f"--kill-switch-path {path}, which exists"
        return f"--exit-duration-in-mins {config.exit_duration_in_mins}" if num_clocks else None

    def ignore_signals(self) -> None:
        """Only record signals from now on, as this process is already ending."""
        self._immediate = False

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self._received = number
        if self._immediate:
            self._immediate = False
            self.interruption = Interrupted(number)
            raise self.interruption
