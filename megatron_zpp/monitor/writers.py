"""Where the numbers go besides the log: TensorBoard, a JSON-lines file, Weights & Biases.

All of them write the same scalars under Megatron-DeepSpeed's names. TensorBoard has each scalar
over three axes: iterations, samples (" vs samples") and tokens (" vs tokens"). TensorBoard's own
purge on restart knows one axis only and would wipe the other two, so what lies after the resume
point is taken out of our own event files instead; every reader then shows one clean curve.
"""

import json
import logging
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.types_pb2 import DT_STRING
from tensorboard.plugins.text.metadata import create_summary_metadata
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from megatron_zpp.monitor.event_files import Axis, Position, forget_after
from megatron_zpp.monitor.metrics import Interval, Iteration, Validation, Writer
from megatron_zpp.settings.config import LogConfig
from zeropp.atomic import write_atomically
from zeropp.errors import InputError

FLUSH_SECONDS = 30
SUFFIX = ".zpp"  # ends the names of our event files: only those are ever touched again
EVENT_FILES = f"events.out.tfevents.*{SUFFIX}"
JSON_LINES = "metrics.jsonl"

logger = logging.getLogger("megatron_zpp")


def open_writers(
    config: LogConfig,
    *,
    rank: int,
    world_size: int,
    resumed_at: Position | None = None,
    settings: Mapping[str, object] | None = None,
) -> list[Writer]:
    """The writers that the flags ask for, on rank 0; none elsewhere.

    `resumed_at` is where the loaded checkpoint stands: what an earlier process wrote beyond it is
    taken out. Without a checkpoint, an earlier run's files move to a folder `earlier-...` beside.
    `settings` (flag: value) is stored with the curves. Raises InputError for a folder that cannot
    be written and for `--wandb-project` without the package.
    """
    if rank != 0:
        return []
    scalars = Scalars(config, world_size)
    writers: list[Writer] = []
    if config.tensorboard_dir:
        folder = _folder(config.tensorboard_dir, resumed_at)
        board = TensorBoard(folder, scalars, config.tensorboard_queue_size)
        board.settings(settings or {})
        writers += [board, JsonLines(folder / JSON_LINES)]
    if config.wandb_project:
        writers.append(WeightsAndBiases(config, scalars, settings or {}))
    return writers


@dataclass(frozen=True)
class Scalars:
    """Names and values, chosen by the `--log-*-to-tensorboard` flags."""

    config: LogConfig
    world_size: int

    def of_iteration(self, it: Iteration) -> dict[str, float | None]:
        """What is known after each iteration."""
        config = self.config
        return {
            "learning-rate/learning-rate": it.learning_rate,
            "batch-size/batch-size": _if(
                config.log_batch_size_to_tensorboard, it.global_batch_size
            ),
            "lm-loss-training/lm loss": it.loss,
            "loss-scale/loss-scale": it.loss_scale,
            "world-size/world-size": _if(config.log_world_size_to_tensorboard, self.world_size),
            "grad-norm/grad-norm": it.grad_norm,
            "num-zeros/num-zeros": it.num_zeros,
            "params-norm/params-norm": it.params_norm,
            "seqlen/actual_seq_length": it.seq_length,
        }

    def of_memory(self, it: Iteration) -> dict[str, float | None]:
        """Bytes of this rank, over iterations only."""
        if it.memory is None or not self.config.log_memory_to_tensorboard:
            return {}
        return {
            "mem-reserved-bytes": it.memory.reserved_bytes,
            "mem-allocated-bytes": it.memory.allocated_bytes,
            "mem-allocated-count": it.memory.allocated_count,
        }

    def of_extra(self, it: Iteration, axis: Axis) -> dict[str, float | None]:
        """Whatever else the iteration brought for one axis."""
        return {name: value for name, value in it.extra.items() if Axis.of(name) is axis}

    def of_interval(self, interval: Interval) -> dict[str, float | None]:
        """Times, in seconds per iteration."""
        timed = self.config.log_timers_to_tensorboard
        return {"iteration-time/iteration-time": _if(timed, interval.seconds_per_iteration)}

    def of_throughput(self, interval: Interval) -> dict[str, float | None]:
        """Model TFLOP/s per rank, as Megatron-LM names it, and MFU, over iterations only."""
        wanted = self.config.log_throughput
        return {"throughput": _if(wanted, interval.model_tflops), "mfu": _if(wanted, interval.mfu)}

    def of_communication(self, interval: Interval) -> dict[str, float]:
        """Bytes that a node sent per step, over iterations only."""
        communication = interval.last.communication
        return communication.scalars() if communication else {}

    def of_validation(self, validation: Validation) -> dict[str, float | None]:
        """Held-out loss, and its perplexity if asked for."""
        name = f"lm-loss-validation/lm loss {validation.split}"
        ppl = self.config.log_validation_ppl_to_tensorboard
        return {name: validation.loss, f"{name} ppl": _if(ppl, validation.perplexity)}


class TensorBoard:
    """Event files in `folder`; one event per axis holds all the scalars of an iteration."""

    def __init__(self, folder: Path, scalars: Scalars, queue_size: int) -> None:
        self._scalars = scalars
        self._file = EventFileWriter(str(folder), queue_size, FLUSH_SECONDS, SUFFIX)

    def settings(self, settings: Mapping[str, object]) -> None:
        """Store the configuration as a table on the text page."""
        if not settings:
            return
        rows = "\n".join(f"| {name} | {value} |" for name, value in settings.items())
        table = f"| setting | value |\n| --- | --- |\n{rows}"
        text = TensorProto(dtype=DT_STRING, string_val=[table.encode()])
        metadata = create_summary_metadata("arguments", "")
        value = Summary.Value(tag="arguments", metadata=metadata, tensor=text)
        self._file.add_event(_event(Summary(value=[value]), 0))

    def iteration(self, iteration: Iteration) -> None:
        """Everything known after one iteration."""
        at = _position(iteration)
        self._write(self._scalars.of_iteration(iteration), at)
        self._write_one(Axis.ITERATIONS, self._scalars.of_memory(iteration), at)
        for axis in Axis:
            self._write_one(axis, self._scalars.of_extra(iteration, axis), at)
        for axis in (Axis.SAMPLES, Axis.TOKENS):
            name, count = axis.value, at.along(axis)
            group = f"steps-vs-{name}"
            self._write_one(axis, {f"{group}/y=steps,x={name}": at.iteration}, at)
            self._write_one(Axis.ITERATIONS, {f"{group}/y={name},x=steps": count}, at)

    def interval(self, interval: Interval) -> None:
        """What only an interval knows."""
        at = _position(interval.last)
        self._write(self._scalars.of_interval(interval), at)
        self._write_one(Axis.ITERATIONS, self._scalars.of_throughput(interval), at)
        self._write_one(Axis.ITERATIONS, self._scalars.of_communication(interval), at)

    def validation(self, validation: Validation) -> None:
        """A held-out loss."""
        self._write(self._scalars.of_validation(validation), _position(validation))

    def flush(self) -> None:
        """Bring everything to disk."""
        self._file.flush()

    def close(self) -> None:
        """Flush and close the file."""
        self._file.close()

    def _write(self, scalars: Mapping[str, float | None], at: Position) -> None:
        for axis in Axis:
            named = {name + axis.suffix: value for name, value in scalars.items()}
            self._write_one(axis, named, at)

    def _write_one(self, axis: Axis, scalars: Mapping[str, float | None], at: Position) -> None:
        values = [
            Summary.Value(tag=name, simple_value=float(value))
            for name, value in scalars.items()
            if value is not None
        ]
        if values:
            self._file.add_event(_event(Summary(value=values), at.along(axis)))


class JsonLines:
    """One JSON object per log interval and per held-out loss, for reading without TensorBoard."""

    def __init__(self, path: Path) -> None:
        self._file = open(path, "a")

    def iteration(self, iteration: Iteration) -> None:
        """Nothing: one line per interval is enough."""

    def interval(self, interval: Interval) -> None:
        """The numbers of the log line."""
        last = interval.last
        self._line(
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
            **{name: value for name, value in last.extra.items() if " vs " not in name},
            **(last.communication.scalars() if last.communication else {}),
        )

    def validation(self, validation: Validation) -> None:
        """A held-out loss."""
        name = f"{validation.split}_loss"
        self._line(iteration=validation.iteration, **{name: validation.loss})

    def flush(self) -> None:
        """Nothing: every line is flushed when it is written."""

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _line(self, **fields: float | None) -> None:
        self._file.write(json.dumps(fields) + "\n")
        self._file.flush()


class WeightsAndBiases:
    """A run of `--wandb-project` with TensorBoard's names, over iterations."""

    def __init__(self, config: LogConfig, scalars: Scalars, settings: Mapping[str, object]) -> None:
        try:
            import wandb
        except ImportError as error:
            raise InputError(
                f"--wandb-project {config.wandb_project} needs the package wandb, which is not "
                "installed: pip install wandb, or leave the flag out"
            ) from error
        self._scalars = scalars
        self._run = wandb.init(
            project=config.wandb_project,
            name=config.wandb_exp_name or None,
            dir=config.wandb_save_dir or None,
            config=dict(settings),
        )

    def iteration(self, iteration: Iteration) -> None:
        """Everything known after one iteration."""
        scalars = self._scalars.of_iteration(iteration) | self._scalars.of_memory(iteration)
        scalars |= self._scalars.of_extra(iteration, Axis.ITERATIONS)
        scalars["consumed-samples"] = iteration.consumed_samples
        scalars["consumed-tokens"] = iteration.consumed_tokens
        self._write(scalars, iteration.iteration)

    def interval(self, interval: Interval) -> None:
        """What only an interval knows."""
        scalars = self._scalars.of_interval(interval) | self._scalars.of_throughput(interval)
        scalars |= self._scalars.of_communication(interval)
        self._write(scalars, interval.last.iteration)

    def validation(self, validation: Validation) -> None:
        """A held-out loss."""
        self._write(self._scalars.of_validation(validation), validation.iteration)

    def flush(self) -> None:
        """Nothing: the package sends in the background."""

    def close(self) -> None:
        """Send the rest and end the run."""
        self._run.finish()

    def _write(self, scalars: Mapping[str, float | None], iteration: int) -> None:
        known = {name: value for name, value in scalars.items() if value is not None}
        if known:
            self._run.log(known, step=iteration)


def _if(wanted: bool, value: float | None) -> float | None:
    return value if wanted else None


def _position(at: Iteration | Validation) -> Position:
    return Position(at.iteration, at.consumed_samples, at.consumed_tokens)


def _event(summary: Summary, step: int) -> Event:
    return Event(wall_time=time.time(), step=step, summary=summary)


def _folder(name: str, resumed_at: Position | None) -> Path:
    folder = Path(name)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if resumed_at is None:
            _set_aside(folder)
        else:
            _forget_after(folder, resumed_at)
    except OSError as error:
        raise InputError(
            f"--tensorboard-dir {name} cannot be written ({error.strerror}): name a folder that can"
        ) from error
    return folder


def _set_aside(folder: Path) -> None:
    old = [*folder.glob(EVENT_FILES), *folder.glob(JSON_LINES)]
    if not old:
        return
    moment = min(path.stat().st_mtime for path in old)
    aside = folder / time.strftime("earlier-%Y%m%d-%H%M%S", time.localtime(moment))
    aside.mkdir(exist_ok=True)
    for path in old:
        path.rename(aside / path.name)
    logger.info("TensorBoard: moved the curves of an earlier run to %s", aside)


def _forget_after(folder: Path, position: Position) -> None:
    points = sum(forget_after(path, position) for path in folder.glob(EVENT_FILES))
    lines = folder / JSON_LINES
    if lines.exists():
        old = lines.read_text().splitlines(keepends=True)
        kept = "".join(line for line in old if _iteration_of(line) <= position.iteration)
        write_atomically(lines, lambda file: file.write(kept.encode()))
    if points:
        logger.info(
            "TensorBoard: left out %d points after iteration %d, where this run resumes",
            points,
            position.iteration,
        )


def _iteration_of(line: str) -> float:
    """The iteration of a JSON line; infinite for one that a killed process left half written."""
    return json.loads(line)["iteration"] if line.endswith("\n") else math.inf
