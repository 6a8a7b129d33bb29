"""Which nodes live: each counts in the store, once a second, and the others watch it count.

Only how long a count stands still is compared, by the clock of the one who looks.
"""

import threading
import time
from contextlib import suppress
from dataclasses import dataclass

import torch.distributed as dist

BEAT_SECONDS = 1.0
DEAD_SECONDS = 15.0  # without a beat; a process on a crowded machine may miss several
LOOK_SECONDS = 0.5  # between two looks at a count
LEFT = "left"


class Pulse:
    """Counts for the node `name` until `close`, which says that it has left."""

    def __init__(self, store: dist.Store, name: str) -> None:
        self._store, self._name = store.clone(), name
        self._closed = threading.Event()
        self._store.set(_key(name), "0")
        self._thread = threading.Thread(target=self._run, name="pulse", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Let the others go on without this node at once."""
        self._closed.set()
        self._thread.join()
        with suppress(RuntimeError):  # nobody is left who would read it
            self._store.set(_key(self._name), LEFT)

    def _run(self) -> None:
        count = 0
        with suppress(RuntimeError):  # the main thread meets the lost store, and says so
            while not self._closed.wait(BEAT_SECONDS):
                count += 1
                self._store.set(_key(self._name), str(count))


@dataclass
class Sight:
    """The last count of a node, when it was looked at and when it had changed, in seconds."""

    count: bytes
    looked: float
    changed: float
    has_changed: bool = False


class Liveness:
    """What this process knows of nodes' lives."""

    def __init__(self, store: dist.Store) -> None:
        self._store = store
        self._sights: dict[str, Sight] = {}

    def is_alive(self, name: str) -> bool:
        """Whether a node is not known to have ended."""
        return self.verdict(name) is not False

    def verdict(self, name: str) -> bool | None:
        """Return whether a node lives; None as long as that is not known."""
        now, sight = time.monotonic(), self._sights.get(name)
        if sight is None or now - sight.looked > LOOK_SECONDS:
            count = self._store.get(_key(name)) if self._store.check([_key(name)]) else b""
            if sight is None:
                sight = self._sights[name] = Sight(count, now, now)
            elif count != sight.count:
                sight.count, sight.changed, sight.has_changed = count, now, True
            sight.looked = now
        if sight.count == LEFT.encode() or sight.looked - sight.changed > DEAD_SECONDS:
            return False
        return True if sight.has_changed else None


def _key(name: str) -> str:
    return f"pulse/{name}"
