"""A lock file in a folder of checkpoints names the one job that may save there.

    FOLDER/.lock    the process that holds the folder, as JSON; it touches the file now and then

A lock outlives a job that is killed. It is stale, and is taken over, if its process is known to
have ended, which only a process on the same machine can tell; or if nobody has touched the file for
`STALE_SECONDS`. File locks of the system are not used: some shared file systems do not have them,
and others only pretend to. Clocks of different machines are never compared.

Nothing here needs torch, as the processes that write checkpoints do not import it.
"""

import hashlib
import json
import logging
import os
import re
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

from zeropp.errors import InputError

LOCK = ".lock"
TOUCH_SECONDS = 5.0
STALE_SECONDS = 30.0
SETTLE_SECONDS = 0.5  # after which only one of several jobs finds that it has taken a lock over
BOOT_ID, PID_NAMESPACE = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")
LABEL = re.compile(r"([0-9a-f]{8})-(\d+)-(\d+)")

log = logging.getLogger("zeropp")


@dataclass(frozen=True, kw_only=True)
class Process:
    """A process; `machine` identifies where its `pid` has a meaning: a boot, a PID namespace.

    ticks: when it started, in the system's clock ticks since its boot, 0 where that is not known.
    host, started: for a person.
    """

    machine: str
    pid: int
    ticks: int
    host: str = ""
    started: str = ""

    @classmethod
    def current(cls) -> "Process":
        """Return this process."""
        pid = os.getpid()
        _, ticks = _state_and_ticks(pid) or ("", 0)
        began = time.time()
        if ticks:
            began += ticks / os.sysconf("SC_CLK_TCK") - time.clock_gettime(time.CLOCK_BOOTTIME)
        started = time.strftime("%Y-%m-%d %H:%M:%S %z", time.localtime(began))
        host = socket.gethostname()
        return cls(machine=_machine(host), pid=pid, ticks=ticks, host=host, started=started)

    @classmethod
    def of_label(cls, label: str) -> "Process | None":
        """Return the process that has this label; None if it is no label."""
        match = LABEL.fullmatch(label)
        return cls(machine=match[1], pid=int(match[2]), ticks=int(match[3])) if match else None

    @property
    def label(self) -> str:
        """A name for files of this process; other processes, on all machines, have other names."""
        return f"{self.machine}-{self.pid}-{self.ticks}"

    def is_alive(self) -> bool | None:
        """Whether the process runs; None if it is on another machine."""
        if self.machine != _machine(socket.gethostname()):
            return None
        found = _state_and_ticks(self.pid)
        if found is None:  # no such process, no /proc, or it hides what other users run
            return _answers(self.pid)
        return found[0] not in "ZX" and found[1] == self.ticks

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, started {self.started}"


class Seen(NamedTuple):
    """A lock file at one moment."""

    text: str
    touched: int  # ns

    @property
    def holder(self) -> Process | None:
        """The process that it names; None if it was not written to its end."""
        try:
            return Process(**json.loads(self.text)["process"])
        except (ValueError, TypeError, KeyError):
            return None

    def __str__(self) -> str:
        return str(self.holder or "a process that has not said its name")


@dataclass(frozen=True)
class FolderLock:
    """This job's lock of a folder, the same on all its ranks; each lock has its own `token`."""

    folder: Path
    process: Process
    token: str

    @classmethod
    def of(cls, folder: Path) -> "FolderLock":
        """Return a lock of this process, which does not hold the folder yet."""
        return cls(folder, Process.current(), uuid.uuid4().hex)

    @property
    def path(self) -> Path:
        """Of the lock file."""
        return self.folder / LOCK

    def look(self) -> Seen | None:
        """Return the lock file as it is now; None if nobody holds the folder. Raises OSError."""
        try:
            with open(self.path) as file:  # opening also asks a file server for the newest state
                return Seen(file.read(), os.fstat(file.fileno()).st_mtime_ns)
        except FileNotFoundError:
            return None

    def take(self) -> Seen | None:
        """Take the folder if it is free; return None, or the lock file of the job that holds it.

        Raises OSError if the folder cannot be written.
        """
        while True:
            try:
                with open(self.path, "x") as file:
                    file.write(self._text())
            except FileExistsError:
                seen = self.look()
                if seen is not None:  # else it has been released meanwhile
                    return seen
            else:
                return None

    def take_over(self, stale: Seen) -> bool:
        """Replace a stale lock; returns whether this process, and no other one, has it now.

        Raises OSError.
        """
        if self.look() != stale:
            return False
        aside = self.folder / f"{LOCK}.{self.process.label}.tmp"
        aside.write_text(self._text())
        aside.replace(self.path)
        time.sleep(SETTLE_SECONDS)
        return self.is_held()

    def is_held(self) -> bool:
        """Whether the lock file is this job's. Raises OSError."""
        seen = self.look()
        return seen is not None and seen.text == self._text()

    def require_held(self) -> None:
        """Raise InputError if another job has taken the folder over; hold it if nobody does."""
        seen = self.take()
        if seen is not None and seen.text != self._text():
            raise InputError(
                f"{self.folder} was taken over by {seen}, which had not heard of this job for "
                f"{STALE_SECONDS:g} s: this checkpoint is not written, and this job ends"
            )

    def release(self) -> None:
        """Remove the lock file, if it is this job's."""
        try:
            if self.is_held():
                self.path.unlink()
        except OSError as error:
            log.warning(
                "cannot remove %s, so the next job has to take it over: %s",
                self.path,
                error.strerror,
            )

    @contextmanager
    def touched(self) -> Iterator[None]:
        """Touch the file now and then, so that jobs on other machines know that this one lives."""
        ended = threading.Event()
        thread = threading.Thread(target=self._touch, args=(ended,), name="lock", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join(STALE_SECONDS)  # a last touch would keep the next job waiting

    def _touch(self, ended: threading.Event) -> None:
        while not ended.wait(TOUCH_SECONDS):
            try:
                if self.is_held():
                    os.utime(self.path)
            except OSError as error:
                log.warning("cannot touch %s: %s", self.path, error.strerror)

    def _text(self) -> str:
        return json.dumps({"process": asdict(self.process), "token": self.token})


def _machine(host: str) -> str:
    parts = [host]
    if PID_NAMESPACE.exists():
        parts = [BOOT_ID.read_text().strip(), os.readlink(PID_NAMESPACE)]
    return hashlib.sha256(" ".join(parts).encode()).hexdigest()[:8]


def _state_and_ticks(pid: int) -> tuple[str, int] | None:
    """The state of a process, as in ps, and when it started; None if /proc does not show it."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # the name before may hold anything
    return fields[0], int(fields[19])


def _answers(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # of another user
        return True
    return True
