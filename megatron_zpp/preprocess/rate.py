"""How far it is: a line on standard error every so many documents, with rate and time left."""

import sys
import time
from dataclasses import dataclass, replace

from megatron_zpp.preprocess.encode import Result


@dataclass(frozen=True, kw_only=True)
class Count:
    """What is written so far, and what was left out."""

    documents: int = 0
    tokens: int = 0
    blank: int = 0
    invalid: int = 0
    first_invalid: str = ""

    def plus(self, result: Result) -> "Count":
        """This and one more chunk."""
        return replace(
            self,
            documents=self.documents + len(result.datasets[0].sequences),
            tokens=self.tokens + sum(len(dataset.ids) for dataset in result.datasets),
            blank=self.blank + result.num_blank,
            invalid=self.invalid + result.num_invalid,
            first_invalid=self.first_invalid or result.first_invalid,
        )


class Progress:
    """Says what was done, at the rate of this run, which may have gone on from an earlier one."""

    def __init__(self, interval: int, total_bytes: int, before: Count, bytes_before: int) -> None:
        self.interval, self.total_bytes = interval, total_bytes
        self._before, self._bytes_before = before, bytes_before
        self._said = before.documents // interval
        self._start = time.monotonic()

    def say(self, count: Count, num_bytes: int) -> None:
        """Print a line if another `interval` documents are done."""
        if count.documents // self.interval == self._said:
            return
        self._said = count.documents // self.interval
        new = num_bytes - self._bytes_before
        left = (self.total_bytes - num_bytes) * self._seconds() / max(new, 1)
        print(
            f"{count.documents} documents, {num_bytes / 1e6:.1f} of {self.total_bytes / 1e6:.1f} "
            f"MB, {count.tokens} tokens ({self.rate(count, num_bytes)}), {_clock(left)} left",
            file=sys.stderr,
            flush=True,
        )

    def rate(self, count: Count, num_bytes: int) -> str:
        """Documents, megabytes and tokens per second of this run."""
        seconds = self._seconds()
        return (
            f"{(count.documents - self._before.documents) / seconds:.1f} documents/s, "
            f"{(num_bytes - self._bytes_before) / 1e6 / seconds:.2f} MB/s, "
            f"{(count.tokens - self._before.tokens) / seconds:.0f} tokens/s"
        )

    def _seconds(self) -> float:
        return max(time.monotonic() - self._start, 1e-9)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"
