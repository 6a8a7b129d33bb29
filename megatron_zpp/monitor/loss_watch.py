"""Notices spikes of the training loss."""

import statistics
from collections import deque
from dataclasses import dataclass, field


@dataclass
class LossWatch:
    """Tells whether a loss is a spike: far above the mean of the iterations before it."""

    WINDOW, LEAST = 100, 20  # iterations: the mean is of the last 100, once there are 20
    DEVIATIONS, SHARE = 6, 0.1  # above the mean by 6 standard deviations and by a tenth

    _recent: deque[float] = field(default_factory=lambda: deque(maxlen=LossWatch.WINDOW))

    def mean_below(self, loss: float) -> float | None:
        """Add a loss; return the mean of those before if it is a spike above them, else None."""
        before = tuple(self._recent)
        self._recent.append(loss)
        if len(before) < self.LEAST:
            return None
        mean = statistics.fmean(before)
        distance = max(self.DEVIATIONS * statistics.pstdev(before, mean), self.SHARE * abs(mean))
        return mean if loss > mean + distance else None
