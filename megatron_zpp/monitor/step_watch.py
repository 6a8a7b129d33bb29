"""Notices steps that are slower than a plan expected."""

import statistics


class StepWatch:
    """Tells once, after the first iterations, whether steps take longer than expected.

    The first `WARM_UP` iterations, which allocate memory and open connections, do not count.
    """

    WARM_UP, LAST = 5, 20  # iterations of a process

    def __init__(self, slowest: float) -> None:
        self.slowest = slowest  # seconds
        self._seconds: list[float] = []

    def median_above(self, seconds: float) -> float | None:
        """Add a step; return the median at the last of the first ones if it is too slow."""
        if len(self._seconds) >= self.LAST:
            return None
        self._seconds.append(seconds)
        if len(self._seconds) < self.LAST:
            return None
        median = statistics.median(self._seconds[self.WARM_UP :])
        return median if median > self.slowest else None
