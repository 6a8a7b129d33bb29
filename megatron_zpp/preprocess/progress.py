"""Report the progress of a run on standard error, with its rate and the time left."""

import sys
import time
from dataclasses import dataclass, replace
from datetime import timedelta

from megatron_zpp.preprocess.encoder import EncodedChunk


@dataclass(frozen=True, kw_only=True)
class Totals:
    """Documents and tokens that were written, blank and invalid lines that were skipped."""

    documents: int = 0
    tokens: int = 0
    blank: int = 0
    invalid: int = 0
    first_invalid: str = ""

    def plus(self, chunk: EncodedChunk) -> "Totals":
        """Return the totals with one more chunk."""
        return replace(
            self,
            documents=self.documents + len(chunk.datasets[0].sequences),
            tokens=self.tokens + sum(len(dataset.ids) for dataset in chunk.datasets),
            blank=self.blank + chunk.num_blank,
            invalid=self.invalid + chunk.num_invalid,
            first_invalid=self.first_invalid or chunk.first_invalid,
        )


class Progress:
    """Print progress lines. Rates are those of this process.

    initial_totals, initial_bytes: what an earlier run, which this one resumes, has written and
    read.
    """

    def __init__(
        self, interval: int, total_bytes: int, initial_totals: Totals, initial_bytes: int
    ) -> None:
        self.interval, self.total_bytes = interval, total_bytes
        self._initial_totals, self._initial_bytes = initial_totals, initial_bytes
        self._intervals_reported = initial_totals.documents // interval
        self._start_time = time.monotonic()

    def report(self, totals: Totals, num_bytes: int) -> None:
        """Print a line if another `interval` documents are done."""
        intervals = totals.documents // self.interval
        if intervals == self._intervals_reported:
            return
        self._intervals_reported = intervals
        bytes_of_run = max(num_bytes - self._initial_bytes, 1)
        seconds_left = (self.total_bytes - num_bytes) * self._elapsed_seconds() / bytes_of_run
        print(
            f"{totals.documents} documents, {num_bytes / 1e6:.1f} of {self.total_bytes / 1e6:.1f} "
            f"MB, {totals.tokens} tokens ({self.rate(totals, num_bytes)}), "
            f"{timedelta(seconds=round(seconds_left))} left",
            file=sys.stderr,
            flush=True,
        )

    def rate(self, totals: Totals, num_bytes: int) -> str:
        """Return the documents, megabytes and tokens per second of this process."""
        seconds = self._elapsed_seconds()
        documents = totals.documents - self._initial_totals.documents
        tokens = totals.tokens - self._initial_totals.tokens
        return (
            f"{documents / seconds:.1f} documents/s, "
            f"{(num_bytes - self._initial_bytes) / 1e6 / seconds:.2f} MB/s, "
            f"{tokens / seconds:.0f} tokens/s"
        )

    def _elapsed_seconds(self) -> float:
        return max(time.monotonic() - self._start_time, 1e-9)
