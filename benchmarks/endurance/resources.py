"""What is read of running processes: memory, descriptors and threads, and lines of their logs."""

import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Generic, TypeVar

SAMPLE_SECONDS = 5.0
LEAST_SAMPLES = 8  # of a process whose growth is said
PAGE = os.sysconf("SC_PAGE_SIZE")
T = TypeVar("T")


class GrowingFile(Generic[T]):
    """What `parse` returns for the complete lines of a file that others write, without None."""

    def __init__(self, path: Path, parse: Callable[[str], T | None]) -> None:
        self._path, self._parse = path, parse
        self._inode = self._offset = 0
        self._items: list[T] = []

    def items(self) -> list[T]:
        """Return all items so far; only what is new is read. None before the file exists."""
        with suppress(FileNotFoundError), self._path.open("rb") as file:
            inode = os.fstat(file.fileno()).st_ino
            if inode != self._inode:  # another file has taken its place
                self._inode, self._offset, self._items = inode, 0, []
            file.seek(self._offset)
            text = file.read()
            complete = text[: text.rfind(b"\n") + 1]
            self._offset += len(complete)
            parsed = map(self._parse, complete.decode(errors="replace").splitlines())
            self._items += [item for item in parsed if item is not None]
        return self._items


@dataclass(frozen=True, kw_only=True)
class Sample:
    """What a process holds at a moment: resident memory in bytes, open files, threads."""

    seconds: float
    memory: int
    descriptors: int
    threads: int


class Recorder:
    """Samples of processes by name; a name may stand for several processes after each other."""

    def __init__(self) -> None:
        self._samples: dict[str, list[Sample]] = {}
        self._started = self._next = time.monotonic()

    def record_if_due(self, processes: Mapping[str, int]) -> None:
        """Add a sample of each process (name: id) that lives, every `SAMPLE_SECONDS`."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + SAMPLE_SECONDS
        for name, process in processes.items():
            folder = Path(f"/proc/{process}")
            with suppress(FileNotFoundError, ProcessLookupError):
                sample = Sample(
                    seconds=round(now - self._started, 1),
                    memory=int((folder / "statm").read_text().split()[1]) * PAGE,
                    descriptors=len(os.listdir(folder / "fd")),
                    threads=len(os.listdir(folder / "task")),
                )
                self._samples.setdefault(f"{name}, process {process}", []).append(sample)

    def result(self) -> dict[str, dict]:
        """All samples and the growth of each process that was seen often enough."""
        return {
            name: {"growth": growth(samples), "samples": [asdict(sample) for sample in samples]}
            for name, samples in self._samples.items()
            if len(samples) >= LEAST_SAMPLES
        }


def growth(samples: Sequence[Sample]) -> dict[str, float]:
    """Median of the last quarter minus that of the second one; the first one is warm-up."""
    quarter = len(samples) // 4
    early, late = samples[quarter : 2 * quarter], samples[-quarter:]
    return {
        name: statistics.median(getattr(sample, name) for sample in late)
        - statistics.median(getattr(sample, name) for sample in early)
        for name in ("memory", "descriptors", "threads")
    }
