"""Report the progress of a run on standard error, with its rate and the time left."""

import sys
import time
from datetime import timedelta

from megatron_zpp.preprocess.partial_output import Journal


class ProgressLines:
    """Print progress lines. Rates are those of this process, which continues from `initial`."""

    def __init__(self, interval: int, total_bytes: int, initial: Journal) -> None:
        self.interval, self.total_bytes, self._initial = interval, total_bytes, initial
        self._intervals_reported = initial.totals.documents // interval
        self._start_time = time.monotonic()

    def report(self, journal: Journal) -> None:
        """Print a line if another `interval` documents are done."""
        totals, num_bytes = journal.totals, journal.bytes_read
        intervals = totals.documents // self.interval
        if intervals == self._intervals_reported:
            return
        self._intervals_reported = intervals
        bytes_of_run = max(num_bytes - self._initial.bytes_read, 1)
        seconds_left = (self.total_bytes - num_bytes) * self._elapsed_seconds() / bytes_of_run
        print(
            f"{totals.documents} documents, {num_bytes / 1e6:.1f} of {self.total_bytes / 1e6:.1f} "
            f"MB, {totals.tokens} tokens ({self.rate(journal)}), "
            f"{timedelta(seconds=round(seconds_left))} left",
            file=sys.stderr,
            flush=True,
        )

    def rate(self, journal: Journal) -> str:
        """Return the documents, megabytes and tokens per second of this process."""
        seconds = self._elapsed_seconds()
        documents = journal.totals.documents - self._initial.totals.documents
        tokens = journal.totals.tokens - self._initial.totals.tokens
        num_bytes = journal.bytes_read - self._initial.bytes_read
        return (
            f"{documents / seconds:.1f} documents/s, "
            f"{num_bytes / 1e6 / seconds:.2f} MB/s, "
            f"{tokens / seconds:.0f} tokens/s"
        )

    def _elapsed_seconds(self) -> float:
        return max(time.monotonic() - self._start_time, 1e-9)
