"""What a person sees: plain lines everywhere, and on a terminal a live progress display under them.

Lines are written as they are, unwrapped and without colour, so that `grep` finds them in a file and
on a screen. Only rank 0 prints, except for warnings, which every rank prints under its own name.
"""

import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType
from typing import TextIO

import rich.console
from rich.live import Live
from rich.text import Text

from megatron_zpp.monitor.metrics import History, Iteration
from megatron_zpp.monitor.progress import Progress

LOGGERS = ("zeropp", "megatron_zpp")
INDENT = "  "

Rows = Sequence[tuple[str, object]]


class Console(AbstractContextManager):
    """Prints for one rank; as a context it also carries the notices of our loggers.

    `interactive` forces the live display on or off; by default it shows on a terminal that can
    move its cursor. `stream` is standard output unless given.
    """

    def __init__(
        self, rank: int = 0, stream: TextIO | None = None, interactive: bool | None = None
    ) -> None:
        self.rank = rank
        self._stream = stream or sys.stdout
        self._encoding = getattr(self._stream, "encoding", None) or "utf-8"
        self._rich = rich.console.Console(file=self._stream, emoji=False, highlight=False)
        self._interactive = self._can_redraw() if interactive is None else interactive
        self._progress = Progress()
        self._live: Live | None = None
        self._handler = _Notices(self)
        self._before: list[tuple[int, bool]] = []

    def line(self, text: str) -> None:
        """Print a line (or several) on rank 0, above the progress display if there is one."""
        if self.rank == 0:
            self._print(text)

    def notice(self, level: int, text: str) -> None:
        """Print what a logger says: notices on rank 0, warnings and errors on every rank."""
        prefix = f"{logging.getLevelName(level).lower()}: " if level >= logging.WARNING else ""
        if self.rank == 0:
            self._print(prefix + text)
        elif prefix:
            self._print(f"[rank {self.rank}] {prefix}{text}")

    def table(self, title: str, rows: Rows) -> None:
        """Print two aligned columns under a title; a value of several lines stays in its column."""
        width = max((len(name) for name, _ in rows), default=0)
        lines = [title]
        for name, value in rows:
            first, *others = str(value).splitlines() or [""]
            lines.append(f"{INDENT}{name:<{width}}{INDENT}{first}")
            lines += [f"{INDENT}{'':<{width}}{INDENT}{other}" for other in others]
        self.line("\n".join(line.rstrip() for line in lines))

    def ending(
        self, history: History, rows: Rows = (), sample: str | None = None, title: str = "Finished"
    ) -> None:
        """Print how training went, more rows (where things lie), and the generated text."""
        speed = f"{history.tokens_per_second:,.0f}" if history.seconds else "none trained"
        losses = [
            ("training loss", _fall(history.first_loss, history.last_loss)),
            ("held-out loss", _fall(history.first_held_out, history.last_held_out)),
        ]
        known = [(name, fall) for name, fall in losses if fall is not None]
        self.table(title, [*known, ("tokens per second", speed), *rows])
        if sample is not None:
            self.line("Sample\n" + "\n".join(INDENT + text for text in sample.splitlines()))

    @contextmanager
    def live(self) -> Iterator[None]:
        """Show progress below the lines while the context lasts, where the terminal allows it."""
        if self.rank != 0 or not self._interactive:
            yield
            return
        with Live(console=self._rich, auto_refresh=False, transient=True) as self._live:
            try:
                yield
            finally:
                self._live = None

    def progress(self, iteration: Iteration) -> None:
        """Take one iteration into the display; costs nothing without one."""
        if self._live is None:
            return
        self._progress.add(iteration)
        if self._progress.due():
            self._fit()
            self._live.update(self._progress, refresh=True)

    def held_out(self, loss: float) -> None:
        """Take the latest held-out loss into the display."""
        self._progress.held_out = loss

    def __enter__(self) -> "Console":
        for name in LOGGERS:
            log = logging.getLogger(name)
            self._before.append((log.level, log.propagate))
            log.setLevel(logging.INFO)
            log.propagate = False
            log.addHandler(self._handler)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for name, (level, propagate) in zip(LOGGERS, self._before, strict=True):
            log = logging.getLogger(name)
            log.setLevel(level)
            log.propagate = propagate
            log.removeHandler(self._handler)
        self._before.clear()

    def _can_redraw(self) -> bool:
        utf8 = self._encoding.lower().replace("-", "").startswith("utf")
        return self._stream.isatty() and utf8 and not self._rich.is_dumb_terminal

    def _fit(self) -> None:
        """Rich measures the process's own terminal, which need not be where `stream` goes."""
        if self._stream.isatty():
            self._rich.size = os.get_terminal_size(self._stream.fileno())

    def _print(self, text: str) -> None:
        text = text.encode(self._encoding, errors="replace").decode(self._encoding)
        if self._live is not None:
            self._rich.print(Text(text), soft_wrap=True)
            return
        self._stream.write(text + "\n")  # one write: lines of several ranks do not mix
        self._stream.flush()


class _Notices(logging.Handler):
    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        self._console.notice(record.levelno, self.format(record))


def _fall(first: float | None, last: float | None) -> str | None:
    if first is None or last is None:
        return None
    if first == last:  # measured once
        return f"{last:.3f}"
    return f"{first:.3f} -> {last:.3f}  ({last - first:+.3f})"
