"""What times a piece of work: a thread's processor time, the wall clock, or events on a GPU."""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

Work = Callable[[], object]
CYCLES_PER_SECOND = 2e9  # of a GPU's clock; more than there are, so that a wait is long enough
QUEUEING = 1.5  # times as long as the host takes to queue work does the GPU wait before it begins
LONGEST = 0.2  # seconds that it waits
FLUSHED = 4  # times the size of the level-2 cache are written to empty it


class Stopwatch(Protocol):
    """Measures how long work takes."""

    def seconds(self, run: Work, times: int, *, cold: bool = False) -> float:
        """Of one of `times` runs in a row; `cold`: each finds nothing of its data in a cache."""

    def lap(self, run: Work) -> float:
        """From when nothing is under way until all that `run` began is done."""


class ThreadStopwatch:
    """Processor time of this thread, which leaves out waiting for a processor."""

    def seconds(self, run: Work, times: int, *, cold: bool = False) -> float:
        """As `Stopwatch` says; caches are left alone: what is timed here is larger than they."""
        start = time.thread_time()
        for _ in range(times):
            run()
        return (time.thread_time() - start) / times

    def lap(self, run: Work) -> float:
        return self.seconds(run, 1)


class WallStopwatch:
    """Time that passes, for work of many threads."""

    def seconds(self, run: Work, times: int, *, cold: bool = False) -> float:
        """As `Stopwatch` says; caches are left alone."""
        start = time.perf_counter()
        for _ in range(times):
            run()
        return (time.perf_counter() - start) / times

    def lap(self, run: Work) -> float:
        return self.seconds(run, 1)


class GpuStopwatch:
    """Time between events on the current stream of a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._flush = device, None

    def seconds(self, run: Work, times: int, *, cold: bool = False) -> float:
        """As `Stopwatch` says; the GPU waits first until all of it is queued, or it would be the
        host's launches that are timed."""
        before = self._empty_cache if cold else _nothing
        before()
        run()  # whatever is done once only
        torch.cuda.synchronize(self._device)
        started = time.perf_counter()
        before()
        run()
        queueing = min(LONGEST, (time.perf_counter() - started) * times * QUEUEING)
        pairs = [(_event(), _event()) for _ in range(times if cold else 1)]
        torch.cuda._sleep(int(queueing * CYCLES_PER_SECOND))
        for begin, end in pairs:
            before()
            begin.record()
            for _ in range(1 if cold else times):
                run()
            end.record()
        torch.cuda.synchronize(self._device)
        return sum(begin.elapsed_time(end) for begin, end in pairs) / 1e3 / times

    def lap(self, run: Work) -> float:
        """As `Stopwatch` says, with whatever the host makes the GPU wait for."""
        begin, end = _event(), _event()
        torch.cuda.synchronize(self._device)
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize(self._device)
        return begin.elapsed_time(end) / 1e3

    def _empty_cache(self) -> None:
        if self._flush is None:
            size = FLUSHED * torch.cuda.get_device_properties(self._device).L2_cache_size
            self._flush = torch.empty(size, dtype=torch.uint8, device=self._device)
        self._flush.zero_()


def quartiles(values: Sequence[float]) -> list[float]:
    """First and third quartile; both ends of fewer than four values."""
    if len(values) < 4:
        return [min(values), max(values)]
    low, _, high = statistics.quantiles(values, n=4)
    return [low, high]


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)


def _nothing() -> None:
    pass
