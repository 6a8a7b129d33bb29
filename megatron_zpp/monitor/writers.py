"""Where numbers go besides the log: TensorBoard, a JSON-lines file, Weights & Biases."""

import json
import logging
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from megatron_zpp.monitor.metrics import Interval, Iteration, Validation, Writer
from megatron_zpp.monitor.report.run_record import JSON_LINES, REPORT, RUN_FACTS, RunFacts
from megatron_zpp.monitor.tensorboard import (
    ALL_AXES,
    FILENAME_SUFFIX,
    ITERATIONS,
    Axis,
    Curves,
    CurveWriter,
    Position,
    ScalarNames,
    TensorBoard,
    communication_scalars,
    optimizer_scalars,
    plain_scalars,
    timer_scalars,
)
from megatron_zpp.settings.config import LogConfig
from zeropp.atomic import write_atomically
from zeropp.errors import InputError

EVENT_FILES = f"events.out.tfevents.*{FILENAME_SUFFIX}"

logger = logging.getLogger("megatron_zpp")


def open_writers(
    config: LogConfig,
    *,
    rank: int,
    world_size: int,
    resumed_at: Position | None = None,
    settings: Mapping[str, object] | None = None,
) -> list[Writer]:
    """Return the writers that the flags ask for, on rank 0; none on other ranks.

    `resumed_at` is the position of the loaded checkpoint: what an earlier process wrote beyond it
    disappears. Without a checkpoint, the files of an earlier run are moved to a subfolder
    `earlier-...`. `settings` (flag: value) is stored with the curves. Raises InputError for a
    folder that cannot be written and for `--wandb-project` without the package.
    """
    if rank != 0:
        return []
    names = ScalarNames(config, world_size)
    writers: list[Writer] = []
    if config.wandb_project:
        writers.append(WeightsAndBiases(config, names, settings or {}))
    if config.tensorboard_dir:
        axes = ALL_AXES if config.log_all_axes_to_tensorboard else ITERATIONS
        folder = _prepare_folder(config.tensorboard_dir, axes, resumed_at)
        writers.append(JsonLines(folder))
        queue = config.tensorboard_queue_size
        writers.append(TensorBoard(folder, names, axes, queue, resumed_at, settings or {}))
    return writers


class JsonLines(Writer):
    """One JSON object per log interval and per held-out loss, for reading without TensorBoard.

    They are in `metrics.jsonl`; what the run is, is in `run.json` beside it.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._file = folder, open(folder / JSON_LINES, "a")
        self._facts = RunFacts()

    def describe(self, facts: RunFacts) -> None:
        """Write what the run is."""
        self._facts = facts
        facts.write(self._folder)

    def sample(self, text: str) -> None:
        """Add the generated text to what the run is."""
        self.describe(replace(self._facts, sample=text))

    def interval(self, interval: Interval) -> None:
        """Write the numbers of the log line."""
        last, memory = interval.last, interval.last.memory
        held = memory and {
            "memory_bytes": memory.allocated_bytes,
            "peak_memory_bytes": memory.peak_allocated_bytes,
        }
        self._write_line(
            iteration=last.iteration,
            consumed_samples=last.consumed_samples,
            consumed_tokens=last.consumed_tokens,
            seconds_per_iteration=interval.seconds_per_iteration,
            learning_rate=last.learning_rate,
            global_batch_size=last.global_batch_size,
            lm_loss=interval.loss,
            loss_scale=last.loss_scale,
            grad_norm=last.grad_norm,
            skipped=interval.skipped,
            nan=interval.nan,
            tokens_per_gpu_per_second=interval.tokens_per_gpu_per_second,
            tflops=interval.tflops,
            **({"empty_micro_batches": interval.empty_share} if interval.empty_share else {}),
            **timer_scalars(last),
            **optimizer_scalars(last),
            **last.others,
            **communication_scalars(last.communication),
            **plain_scalars(last.communication),
            **(held or {}),
        )

    def validation(self, validation: Validation) -> None:
        """Write a held-out loss."""
        name = f"{validation.split}_loss"
        self._write_line(iteration=validation.iteration, **{name: validation.loss})

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _write_line(self, **fields: float | None) -> None:
        self._file.write(json.dumps(fields) + "\n")
        self._file.flush()


class WeightsAndBiases(CurveWriter):
    """A run of `--wandb-project`, with TensorBoard's names, over iterations."""

    def __init__(
        self, config: LogConfig, names: ScalarNames, settings: Mapping[str, object]
    ) -> None:
        try:
            import wandb  # noqa: PLC0415  (optional)
        except ImportError as error:
            raise InputError(
                f"--wandb-project {config.wandb_project} needs the package wandb, which is not "
                "installed: pip install wandb, or leave the flag out"
            ) from error
        self.names = names
        self._run = wandb.init(
            project=config.wandb_project,
            name=config.wandb_exp_name or None,
            entity=config.wandb_entity or None,
            dir=config.wandb_save_dir or None,
            config=dict(settings),
        )

    def iteration(self, iteration: Iteration) -> None:
        """Send everything known after one iteration."""
        consumed = {
            "consumed-samples": iteration.consumed_samples,
            "consumed-tokens": iteration.consumed_tokens,
        }
        self.write([*self.names.iteration(iteration), (ITERATIONS, consumed)], iteration)

    def close(self) -> None:
        """Send the rest and end the run."""
        self._run.finish()

    def write(self, curves: Iterable[Curves], position: Position) -> None:
        """Send scalars under the names that they have over iterations."""
        scalars = {name: value for _, part in curves for name, value in part.items()}
        if scalars:
            self._run.log(scalars, step=position.iteration)


def _prepare_folder(name: str, axes: Sequence[Axis], resumed_at: Position | None) -> Path:
    """Create the folder; set aside, or cut at the checkpoint, what earlier processes left in it."""
    folder = Path(name)
    try:
        for axis in axes:
            (folder / axis.folder).mkdir(parents=True, exist_ok=True)
        if resumed_at is None:
            _set_aside(folder)
        else:
            _cut_json_lines(folder / JSON_LINES, resumed_at.iteration)
    except OSError as error:
        raise InputError(
            f"--tensorboard-dir {name} cannot be written ({error.strerror}): name a folder that can"
        ) from error
    return folder


def _set_aside(folder: Path) -> None:
    """Move the files of an earlier run to a subfolder named after the time it began."""
    old_files = [path for axis in Axis for path in (folder / axis.folder).glob(EVENT_FILES)]
    old_files += [folder / name for name in (JSON_LINES, RUN_FACTS, REPORT)]
    old_files = [path for path in old_files if path.exists()]
    if not old_files:
        return
    began = min(path.stat().st_mtime for path in old_files)
    aside = folder / time.strftime("earlier-%Y%m%d-%H%M%S", time.localtime(began))
    for path in old_files:
        target = aside / path.relative_to(folder)
        target.parent.mkdir(parents=True, exist_ok=True)
        path.rename(target)
    logger.info("TensorBoard: moved the curves of an earlier run to %s", aside)


def _cut_json_lines(path: Path, last_iteration: int) -> None:
    """Remove the lines of iterations beyond `last_iteration`."""
    if not path.exists():
        return
    lines = path.read_text().splitlines(keepends=True)
    remaining = "".join(line for line in lines if _iteration_of(line) <= last_iteration)
    write_atomically(path, lambda file: file.write(remaining.encode()))


def _iteration_of(line: str) -> float:
    """The iteration of a JSON line; infinite for a line that a killed process left incomplete."""
    return json.loads(line)["iteration"] if line.endswith("\n") else math.inf
