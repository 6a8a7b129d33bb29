"""Timers: a clock of the CPU, or events on a GPU."""

import time
from collections.abc import Callable

import torch

Work = Callable[[], object]
WALL_CLOCK = time.perf_counter  # for work of many threads
THREAD_CLOCK = time.thread_time  # processor time of this thread, without its waits
CYCLES_PER_SECOND = 2e9  # at least a GPU's clock rate, so that a wait is long enough
QUEUEING_FACTOR = 1.5  # the GPU waits this many times as long as the host needs to queue the work
LONGEST_WAIT = 0.2  # seconds
CACHE_FACTOR = 4  # to empty the level-2 cache, this many times its size is written


class CpuTimer:
    """Times work on the CPU by a clock that returns seconds, as `WALL_CLOCK` does."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock

    def mean_seconds(self, run: Work, times: int, *, cold: bool = False) -> float:
        """Mean seconds of consecutive runs.

        Caches are not emptied: what is timed here is larger than they are.
        """
        start = self._clock()
        for _ in range(times):
            run()
        return (self._clock() - start) / times

    def seconds(self, run: Work) -> float:
        """Seconds of one run."""
        return self.mean_seconds(run, 1)


class GpuTimer:
    """Time between events on the current stream of a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._flushed: torch.Tensor | None = None

    def mean_seconds(self, run: Work, times: int, *, cold: bool = False) -> float:
        """Mean seconds of consecutive runs; with `cold` no run finds its data cached.

        The GPU waits until all work is queued, so that launches are not timed.
        """
        before = self._empty_cache if cold else _nothing
        before()
        run()  # the first run may compile or allocate
        torch.cuda.synchronize(self._device)
        started = time.perf_counter()
        before()
        run()
        wait = min(LONGEST_WAIT, (time.perf_counter() - started) * times * QUEUEING_FACTOR)
        pairs = [(_event(), _event()) for _ in range(times if cold else 1)]
        torch.cuda._sleep(int(wait * CYCLES_PER_SECOND))
        for begin, end in pairs:
            before()
            begin.record()
            for _ in range(1 if cold else times):
                run()
            end.record()
        torch.cuda.synchronize(self._device)
        return sum(begin.elapsed_time(end) for begin, end in pairs) / 1e3 / times

    def seconds(self, run: Work) -> float:
        """Seconds of one run that starts on an idle device, until all its work is done.

        They include the time in which the GPU waits for the host.
        """
        begin, end = _event(), _event()
        torch.cuda.synchronize(self._device)
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize(self._device)
        return begin.elapsed_time(end) / 1e3

    def _empty_cache(self) -> None:
        if self._flushed is None:
            size = CACHE_FACTOR * torch.cuda.get_device_properties(self._device).L2_cache_size
            self._flushed = torch.empty(size, dtype=torch.uint8, device=self._device)
        self._flushed.zero_()


Timer = CpuTimer | GpuTimer


def timer_for(device: torch.device) -> Timer:
    """Events on a GPU, the wall clock elsewhere."""
    return GpuTimer(device) if device.type == "cuda" else CpuTimer(WALL_CLOCK)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)


def _nothing() -> None:
    pass
