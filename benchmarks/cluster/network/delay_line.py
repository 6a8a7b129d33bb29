"""A link with a delay, for systems whose kernel has no netem: frames wait here before they go on.

Each end is a TAP device in a node's namespace. A thread reads the frames that one node sends and
writes them to the other one when they are old enough, in their order.
"""

import fcntl
import os
import selectors
import struct
import threading
import time
from collections import deque

TUNSETIFF = 0x400454CA  # linux/if_tun.h
IFF_TAP, IFF_NO_PI = 0x0002, 0x1000
FRAME_BYTES = 2**16  # more than any frame has


class DelayLine:
    """Two devices of this namespace, to be moved into those of two nodes; gone when closed."""

    def __init__(self, names: tuple[str, str], seconds: float) -> None:
        """`seconds`: of a frame on its way to the other end."""
        self._seconds = seconds
        self._ends = [_open(name) for name in names]
        self._frames: list[deque[tuple[float, bytes]]] = [deque(), deque()]  # to each end
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._carry, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread and remove the devices."""
        self._is_closed.set()
        self._thread.join()
        for end in self._ends:
            os.close(end)

    def _carry(self) -> None:
        with selectors.DefaultSelector() as selector:
            for index, end in enumerate(self._ends):
                selector.register(end, selectors.EVENT_READ, 1 - index)
            while not self._is_closed.is_set():
                for key, _ in selector.select(self._wait()):
                    frame = os.read(key.fd, FRAME_BYTES)
                    self._frames[key.data].append((time.monotonic() + self._seconds, frame))
                self._deliver()

    def _wait(self) -> float:
        """Seconds until the next frame is due, or until closing is looked for."""
        due = [frames[0][0] for frames in self._frames if frames]
        return max(0.0, min(due) - time.monotonic()) if due else 0.1

    def _deliver(self) -> None:
        for end, frames in zip(self._ends, self._frames, strict=True):
            while frames and frames[0][0] <= time.monotonic():
                os.write(end, frames.popleft()[1])


def _open(name: str) -> int:
    """Create a TAP device; returns its file."""
    end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(end, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TAP | IFF_NO_PI))
    return end
