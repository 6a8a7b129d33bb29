"""Commands on several machines, one on each: what they print, how they end.

Each of them ends, and ends its ranks, when its standard input is closed (`host_main.py`). So they
end when this process does, however it ends, and when a connection is lost.
"""

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import BinaryIO

from zeropp.ranks.exit import OTHER_RANK_FAILED
from zeropp.ranks.launcher.signals import StoppedBySignal

POLL_SECONDS = 0.1
PATIENCE_SECONDS = 15  # with the machine whose rank failed, after others have ended because of it
CONNECTION_LOST = 255  # ssh's own exit code
STOPPED = 128 + signal.SIGTERM  # by this process


class Job:
    """One command on each of several hosts; `commands` has the local command line of each."""

    def __init__(self, commands: Mapping[str, Sequence[str]]) -> None:
        self._commands = commands
        self._printing = threading.Lock()
        self._processes: dict[str, subprocess.Popen] = {}
        self._relays: list[threading.Thread] = []
        self._ended: dict[str, int] = {}  # host -> exit code, in the order of their ends
        self._first_end = 0.0

    def run(self) -> int:
        """Run the commands until all have ended; return 0, or the exit code of the first to fail.

        If one fails, the others are ended. So they are by SIGINT and SIGTERM, which are raised as
        KeyboardInterrupt and StoppedBySignal when they have had time to save.
        """
        signal.signal(signal.SIGTERM, _raise_signal)
        try:
            for host, command in self._commands.items():
                self._start(host, command)
            self._wait()
        except (KeyboardInterrupt, StoppedBySignal):
            self._end()
            self._wait()
            raise
        finally:
            for process in self._processes.values():
                process.kill()  # does nothing unless a second signal has ended the wait
        return self._report()

    def _start(self, host: str, command: Sequence[str]) -> None:
        pipe = subprocess.PIPE
        process = subprocess.Popen(
            command, bufsize=0, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True
        )
        self._processes[host] = process
        for source, target in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
            relay = threading.Thread(
                target=self._relay, args=(host, source, target.buffer), daemon=True
            )
            relay.start()
            self._relays.append(relay)

    def _relay(self, host: str, source: BinaryIO, target: BinaryIO) -> None:
        """Copy lines, with the host before each."""
        with open(source.fileno(), "rb", closefd=False) as lines:
            for line in lines:
                with self._printing:
                    target.write(f"{host}: ".encode() + line.rstrip(b"\n") + b"\n")
                    target.flush()

    def _wait(self) -> None:
        """Return when all have ended and been printed; end the others when one has failed."""
        while len(self._ended) < len(self._processes):
            for host, process in self._processes.items():
                if host not in self._ended and process.poll() is not None:
                    code = process.returncode
                    self._ended[host] = code if code >= 0 else 128 - code
                    self._first_end = self._first_end or time.monotonic()
            codes = [code for code in self._ended.values() if code != 0]
            waited = time.monotonic() - self._first_end
            if codes and (set(codes) != {OTHER_RANK_FAILED} or waited > PATIENCE_SECONDS):
                self._end()
            time.sleep(POLL_SECONDS)
        for relay in self._relays:
            relay.join()

    def _end(self) -> None:
        for process in self._processes.values():
            process.stdin.close()

    def _report(self) -> int:
        """Name the host that failed first, and not because of another one; return its code."""
        failed = {host: code for host, code in self._ended.items() if code != 0}
        if not failed:
            return 0
        host = min(failed, key=lambda host: failed[host] in (OTHER_RANK_FAILED, STOPPED))
        code = failed[host]
        what = "lost the connection to it, or ssh failed" if code == CONNECTION_LOST else "failed"
        print(f"zeropp: {host} {what} (exit code {code})", file=sys.stderr, flush=True)
        return code


def _raise_signal(number: int, frame: FrameType | None) -> None:
    raise StoppedBySignal(number)
