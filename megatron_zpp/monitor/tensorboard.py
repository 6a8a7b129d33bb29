"""TensorBoard's event files: one folder for each axis that curves are drawn over.

By default that is one axis, iterations.

A resumed run shows each step once because of `SummaryWriter(purge_step=...)`: TensorBoard drops
what an interrupted process wrote at or beyond that step. It does so for all curves in a folder.
Curves over iterations, samples and tokens therefore cannot share one: their steps count different
things.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter

from megatron_zpp.monitor.metrics import Interval, Iteration, Validation, Writer
from megatron_zpp.monitor.tensorboard_names import Axis, Curves, Position, ScalarNames

FLUSH_SECONDS = 30
FILENAME_SUFFIX = ".zpp"  # tells the event files of this program from those of others


class TensorBoard(Writer):
    """Writes scalars over `axes` to `folder`, and to `vs_samples` and `vs_tokens` in it.

    `resumed_at` is the position of the loaded checkpoint: later points of an earlier process are
    not shown any more.
    `settings` (flag: value) is a table on the text page.
    """

    def __init__(
        self,
        folder: Path,
        names: ScalarNames,
        axes: Sequence[Axis],
        queue_size: int,
        resumed_at: Position | None,
        settings: Mapping[str, object],
    ) -> None:
        self._names = names
        self._writers = {
            axis: SummaryWriter(
                str(folder / axis.folder),
                purge_step=axis.coordinate(resumed_at) + 1 if resumed_at else None,
                max_queue=queue_size,
                flush_secs=FLUSH_SECONDS,
                filename_suffix=FILENAME_SUFFIX,
            )
            for axis in axes
        }

        if settings:
            rows = "\n".join(f"| {name} | {value} |" for name, value in settings.items())
            table = f"| setting | value |\n| --- | --- |\n{rows}"
            self._writers[Axis.ITERATIONS].add_text("arguments", table, 0)

    def iteration(self, iteration: Iteration) -> None:
        """Write everything known after one iteration."""
        self._write(self._names.iteration(iteration), iteration)
        if len(self._writers) > 1:
            for axis, scalars in self._names.progress(iteration).items():
                self._write_over(axis, scalars, iteration)

    def interval(self, interval: Interval) -> None:
        """Write what is known once per log interval."""
        self._write(self._names.interval(interval), interval.last)

    def validation(self, validation: Validation) -> None:
        """Write a held-out loss."""
        self._write(self._names.validation(validation), validation)

    def flush(self) -> None:
        """Bring everything to disk."""
        for writer in self._writers.values():
            writer.flush()

    def close(self) -> None:
        """Flush and close the files."""
        for writer in self._writers.values():
            writer.close()

    def _write(self, curves: Iterable[Curves], position: Position) -> None:
        for axes, scalars in curves:
            for axis in self._writers.keys() & axes:
                named = {name + axis.suffix: value for name, value in scalars.items()}
                self._write_over(axis, named, position)

    def _write_over(self, axis: Axis, scalars: Mapping[str, float], position: Position) -> None:
        for name, value in scalars.items():
            self._writers[axis].add_scalar(name, value, axis.coordinate(position))
