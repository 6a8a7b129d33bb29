"""Failure detection: each process writes to a store once a second, and others watch what it writes.

Only how long that stands still is compared, by the clock of the one who looks.
"""

import threading
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass

BEAT_SECONDS = 1.0
DEAD_SECONDS = 15.0  # without a beat; a process on a crowded machine may miss several
LOOK_SECONDS = 0.5  # between two looks at a beat
LEFT = "left"  # the last beat of a process that ends by itself


class Pulse:
    """Calls `beat` every `seconds` in a thread of its own, until it is closed."""

    def __init__(
        self, beat: Callable[[], None], seconds: float = BEAT_SECONDS, name: str = "pulse"
    ) -> None:
        self._beat, self._seconds = beat, seconds
        self.closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self.closed.set()
        self._thread.join()

    def _run(self) -> None:
        while not self.closed.wait(self._seconds):
            self._beat()


@dataclass
class Sight:
    """The last beat of a process, when it was looked at and when it had changed, in seconds."""

    beat: str
    looked: float
    changed: float
    has_changed: bool = False


class Liveness:
    """What this process knows of others' lives; `read` returns the last beat of one, "" if none."""

    def __init__(
        self,
        read: Callable[[Hashable], str],
        *,
        dead_seconds: float = DEAD_SECONDS,
        look_seconds: float = LOOK_SECONDS,
    ) -> None:
        self._read, self._dead_seconds, self._look_seconds = read, dead_seconds, look_seconds
        self._sights: dict[Hashable, Sight] = {}

    def is_alive(self, name: Hashable) -> bool:
        """Whether a process is not known to have ended."""
        return self.verdict(name) is not False

    def verdict(self, name: Hashable) -> bool | None:
        """Return whether a process lives; None as long as that is not known."""
        now, sight = time.monotonic(), self._sights.get(name)
        if sight is None or now - sight.looked > self._look_seconds:
            beat = self._read(name)
            if sight is None:
                sight = self._sights[name] = Sight(beat, now, now)
            elif beat != sight.beat:
                sight.beat, sight.changed, sight.has_changed = beat, now, True
            sight.looked = now
        if sight.beat == LEFT or sight.looked - sight.changed > self._dead_seconds:
            return False
        return True if sight.has_changed else None
