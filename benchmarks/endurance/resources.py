"""Memory, descriptors and threads of a process over time, and how much they grow."""

import os
import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

SAMPLE_SECONDS = 5.0
LEAST_SAMPLES = 8  # of a process whose growth is said
PAGE = os.sysconf("SC_PAGE_SIZE")


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
        """Add a sample of each process (name: id), every `SAMPLE_SECONDS`."""
        now = time.monotonic()
        if now >= self._next:
            self._next = now + SAMPLE_SECONDS
            for name, process in processes.items():
                self._record(name, process, now - self._started)

    def _record(self, name: str, process: int, seconds: float) -> None:
        """Add a sample of `process`; nothing if it has ended."""
        folder = Path(f"/proc/{process}")
        with suppress(FileNotFoundError, ProcessLookupError):
            sample = Sample(
                seconds=round(seconds, 1),
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
