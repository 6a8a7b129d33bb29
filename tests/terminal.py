"""A pseudo-terminal whose output a test reads."""

import fcntl
import os
import pty
import re
import struct
import termios
import threading

ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Terminal:
    """A pseudo-terminal, and everything that was written to it."""

    def __init__(self, columns: int) -> None:
        self._reader, writer = pty.openpty()
        fcntl.ioctl(writer, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        self.stream = os.fdopen(writer, "w", encoding="utf-8")
        self._chunks: list[bytes] = []
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        while True:
            try:
                chunk = os.read(self._reader, 65536)
            except OSError:  # Linux's end of file on a pseudo-terminal
                return
            self._chunks.append(chunk)

    def close(self) -> str:
        self.stream.close()
        self._thread.join()
        os.close(self._reader)
        return b"".join(self._chunks).decode()
