"""The picture of a running training: bar, loss curve, speed, time left, memory; two lines."""

import math
import time
from collections import deque
from datetime import timedelta

from rich.console import Console, ConsoleOptions, RenderResult
from rich.progress_bar import ProgressBar
from rich.text import Text

from megatron_zpp.monitor.metrics import Iteration

FRAME_SECONDS = 0.1  # between two pictures
WINDOW = 20  # iterations that speed and time left are averaged over
BAR_CELLS = 30
CURVE_CELLS = 24
BLOCKS = "▁▂▃▄▅▆▇█"
NOT_FINITE = "!"
FLAT = 0.002  # relative change of the loss below which the arrow is level


class Curve:
    """A sequence of any length in at most `CURVE_CELLS` means of equally many values."""

    def __init__(self) -> None:
        self._means: list[float] = []
        self._stride = 1
        self._partial: list[float] = []

    def add(self, value: float) -> None:
        """Append a value; when all cells are full, neighbours are merged."""
        self._partial.append(value)
        if len(self._partial) < self._stride:
            return
        self._means.append(sum(self._partial) / self._stride)
        self._partial = []
        if len(self._means) == CURVE_CELLS:
            pairs = zip(self._means[::2], self._means[1::2], strict=True)
            self._means = [(left + right) / 2 for left, right in pairs]
            self._stride *= 2

    def __str__(self) -> str:
        finite = [mean for mean in self._means if math.isfinite(mean)]
        low, high = min(finite, default=0.0), max(finite, default=0.0)
        return "".join(_block(mean, low, high) for mean in self._means)


class Progress:
    """What the display knows; rich draws it by iterating over its lines."""

    def __init__(self) -> None:
        self.held_out: float | None = None
        self._window: deque[Iteration] = deque(maxlen=WINDOW)
        self._curve = Curve()
        self._drawn = -math.inf  # monotonic seconds

    def add(self, iteration: Iteration) -> None:
        """Take one iteration in."""
        self._window.append(iteration)
        self._curve.add(iteration.loss)

    def due(self) -> bool:
        """Whether it is time for the next picture; the last iteration always is."""
        now = time.monotonic()
        last = self._window[-1]
        if now - self._drawn < FRAME_SECONDS and last.iteration < last.train_iters:
            return False
        self._drawn = now
        return True

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        last = self._window[-1]
        yield Text.assemble(
            _bar(console, options, last),
            f" {last.iteration:,}/{last.train_iters:,} ",
            (f"{last.iteration / last.train_iters:.0%}", "bold"),
            f"  {self._time_left()} left",
            no_wrap=True,
            overflow="ellipsis",
        )
        yield Text.assemble(*self._numbers(), no_wrap=True, overflow="ellipsis")

    def _numbers(self) -> list[str | tuple[str, str]]:
        last = self._window[-1]
        seconds = sum(each.seconds for each in self._window)
        tokens = sum(each.tokens for each in self._window)
        parts: list[str | tuple[str, str]] = ["loss ", (f"{last.loss:.4f} {self._arrow()}", "bold")]
        parts += [" ", (str(self._curve), "cyan")]
        if self.held_out is not None:
            parts += ["  held-out ", (f"{self.held_out:.4f}", "bold")]
        parts.append(f"  {_short(tokens / seconds)} tokens/s")
        if last.memory is not None:
            parts.append(f"  {last.memory.allocated_bytes / 2**30:.2f} GiB")
        return parts

    def _arrow(self) -> str:
        losses = [each.loss for each in self._window]
        half = len(losses) // 2
        if half == 0:
            return "→"
        before = sum(losses[:half]) / half
        change = sum(losses[-half:]) / half - before
        if not math.isfinite(change):
            return NOT_FINITE
        if abs(change) < FLAT * abs(before):
            return "→"
        return "↓" if change < 0 else "↑"

    def _time_left(self) -> timedelta:
        last = self._window[-1]
        mean = sum(each.seconds for each in self._window) / len(self._window)
        return timedelta(seconds=round(mean * (last.train_iters - last.iteration)))


def _bar(console: Console, options: ConsoleOptions, last: Iteration) -> Text:
    bar = ProgressBar(total=last.train_iters, completed=last.iteration, width=BAR_CELLS)
    segments = console.render(bar, options.update(width=BAR_CELLS))
    return Text.assemble(*((segment.text, segment.style or "") for segment in segments))


def _block(mean: float, low: float, high: float) -> str:
    if not math.isfinite(mean):
        return NOT_FINITE
    if high == low:
        return BLOCKS[0]
    return BLOCKS[round((mean - low) / (high - low) * (len(BLOCKS) - 1))]


def _short(number: float) -> str:
    for unit, size in (("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.1f}{unit}"
    return f"{number:.0f}"
