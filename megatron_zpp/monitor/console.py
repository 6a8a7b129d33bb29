"""What a person sees: plain lines everywhere, and on a terminal a progress bar below them.

Lines are written as they are, unwrapped and without colour, so that `grep` finds them in a file and
on a screen. Only rank 0 prints, except for warnings, which every rank prints under its own name.
"""

import logging
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TextIO

import rich.console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Column
from rich.text import Text

from megatron_zpp.monitor.metrics import History, Iteration

LOGGERS = ("zeropp", "megatron_zpp")
INDENT = "  "
REFRESH_SECONDS = 0.1

Rows = Sequence[tuple[str, object]]


class Console(AbstractContextManager):
    """Prints for one rank; as a context it also prints what this program's loggers say.

    `interactive` switches the progress bar on or off; by default it shows on a terminal that can
    move its cursor. `stream` is standard output unless given; `is_terminal` says whether a person
    reads it.
    """

    def __init__(
        self, rank: int = 0, stream: TextIO | None = None, interactive: bool | None = None
    ) -> None:
        self.rank = rank
        self._stream = stream or sys.stdout
        self._encoding = getattr(self._stream, "encoding", None) or "utf-8"
        self.is_terminal = self._stream.isatty()
        self._rich = rich.console.Console(file=self._stream, emoji=False, highlight=False)
        if interactive is None:
            interactive = self.is_terminal and not self._rich.is_dumb_terminal
        self._interactive = interactive
        self._bar: ProgressBar | None = None
        self._handler = _ConsoleHandler(self)
        self._logger_states: list[tuple[int, bool]] = []

    def line(self, text: str) -> None:
        """Print a line (or several) on rank 0, above the progress bar if there is one."""
        if self.rank == 0:
            self._print(text)

    def notice(self, level: int, text: str) -> None:
        """Print a log message: of any level on rank 0, warnings and errors on every rank."""
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
        """Print how training went, then `rows`, then the generated text."""
        speed = f"{history.tokens_per_second:,.0f}" if history.seconds else "none trained"
        losses = [
            ("training loss", _change(history.first_loss, history.last_loss)),
            ("held-out loss", _change(history.first_held_out, history.last_held_out)),
        ]
        loss_rows = [(name, change) for name, change in losses if change is not None]
        self.table(title, [*loss_rows, ("tokens per second", speed), *rows])
        if sample is not None:
            self.line("Sample\n" + "\n".join(INDENT + text for text in sample.splitlines()))

    @contextmanager
    def live(self) -> Iterator[None]:
        """Show a progress bar below the lines while the context lasts, on rank 0's terminal."""
        if self.rank != 0 or not self._interactive:
            yield
            return
        with ProgressBar(self._rich) as self._bar:
            try:
                yield
            finally:
                self._bar = None

    def progress(self, iteration: Iteration) -> None:
        """Move the progress bar to an iteration, if there is one."""
        if self._bar is not None:
            self._bar.show(iteration)

    def held_out(self, loss: float) -> None:
        """Show the latest held-out loss beside the progress bar, if there is one."""
        if self._bar is not None:
            self._bar.held_out = f"held-out {loss:.4f}"

    def set_level(self, level: int) -> None:
        """From now on, print what the loggers say at this level of Python's logging or above."""
        for name in LOGGERS:
            logging.getLogger(name).setLevel(level)

    def __enter__(self) -> "Console":
        for name in LOGGERS:
            log = logging.getLogger(name)
            self._logger_states.append((log.level, log.propagate))
            log.setLevel(logging.INFO)
            log.propagate = False
            log.addHandler(self._handler)
        return self

    def __exit__(self, *exception: object) -> None:
        for name, (level, propagate) in zip(LOGGERS, self._logger_states, strict=True):
            log = logging.getLogger(name)
            log.setLevel(level)
            log.propagate = propagate
            log.removeHandler(self._handler)
        self._logger_states.clear()

    def _print(self, text: str) -> None:
        text = text.encode(self._encoding, errors="replace").decode(self._encoding)
        if self._bar is not None:
            self._rich.print(Text(text), soft_wrap=True)
            return
        self._stream.write(text + "\n")  # one write: lines of several ranks do not mix
        self._stream.flush()


class ProgressBar(Progress):
    """Rich's progress of one task: iterations done, time left, losses, speed.

    It redraws from `show` instead of a thread of its own, as loader processes are forked meanwhile.
    """

    def __init__(self, console: rich.console.Console) -> None:
        super().__init__(
            BarColumn(bar_width=None, table_column=Column(ratio=1)),  # what the others leave
            MofNCompleteColumn(table_column=Column(no_wrap=True)),
            TimeRemainingColumn(table_column=Column(no_wrap=True)),
            TextColumn("left, loss {task.fields[loss]:.4f}"),
            TextColumn("{task.fields[held_out]}"),
            TextColumn("{task.fields[speed]:,.0f} tokens/s"),
            console=console,
            auto_refresh=False,
            transient=True,
            expand=True,
        )
        self.held_out = ""
        self._task: TaskID | None = None
        self._drawn = 0.0  # monotonic seconds

    def show(self, iteration: Iteration) -> None:
        """Update all columns; redraw at most every `REFRESH_SECONDS`."""
        fields = {
            "loss": iteration.loss,
            "held_out": self.held_out,
            "speed": iteration.tokens / iteration.seconds,
        }
        if self._task is None:
            before = iteration.iteration - 1
            self._task = self.add_task("", total=iteration.train_iters, completed=before, **fields)
        self.update(self._task, completed=iteration.iteration, **fields)
        if time.monotonic() - self._drawn >= REFRESH_SECONDS:
            self._drawn = time.monotonic()
            self.refresh()


class _ConsoleHandler(logging.Handler):
    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        self._console.notice(record.levelno, self.format(record))


def _change(first: float | None, last: float | None) -> str | None:
    if first is None or last is None:
        return None
    if first == last:  # measured once
        return f"{last:.3f}"
    return f"{first:.3f} -> {last:.3f}  ({last - first:+.3f})"
