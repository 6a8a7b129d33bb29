"""TensorBoard's event files, the names of the scalars in them, and the value of each.

The names are Megatron-DeepSpeed's, where it has one; `throughput` is Megatron-LM's. Weights &
Biases gets the same names. With `--log-all-axes-to-tensorboard` most curves are drawn three times,
as in Megatron-DeepSpeed: over iterations, over samples (" vs samples" is appended to the name) and
over tokens (" vs tokens"). `OVERVIEW` is what one looks at first, under names that sort first.

A resumed run shows each step once because of `SummaryWriter(purge_step=...)`: TensorBoard drops
what an interrupted process wrote at or beyond that step. It does so for all curves in a folder.
Curves over iterations, samples and tokens therefore cannot share one: their steps count different
things.
"""

import enum
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from torch.utils.tensorboard import SummaryWriter

from megatron_zpp.monitor.communication import ACROSS_NODES, Communication, sum_over
from megatron_zpp.monitor.metrics import Interval, Iteration, Validation, Writer
from megatron_zpp.settings.config import LogConfig
from zeropp.wire import HOPS, CodedMessages

FLUSH_SECONDS = 30
FILENAME_SUFFIX = ".zpp"  # tells the event files of this program from those of others
Scalars = dict[str, float]


class Position(Protocol):
    """How far training is: iterations done, samples and tokens consumed by all ranks."""

    iteration: int
    consumed_samples: int
    consumed_tokens: int


class Axis(enum.Enum):
    """What a curve is drawn over.

    `counter` is the attribute of `Position` that counts it, `suffix` is appended to the names of
    scalars, `folder` is where TensorBoard's files for this axis are.
    """

    ITERATIONS = ("iteration", "", ".")
    SAMPLES = ("consumed_samples", " vs samples", "vs_samples")
    TOKENS = ("consumed_tokens", " vs tokens", "vs_tokens")

    def __init__(self, counter: str, suffix: str, folder: str) -> None:
        self.counter, self.suffix, self.folder = counter, suffix, folder

    def coordinate(self, position: Position) -> int:
        """Where `position` is on this axis."""
        return getattr(position, self.counter)


ALL_AXES = tuple(Axis)
ITERATIONS = (Axis.ITERATIONS,)
OVERVIEW = "0-overview/"
Curves = tuple[tuple[Axis, ...], Scalars]  # scalars, and the axes that they are drawn over


@dataclass(frozen=True)
class ScalarNames:
    """Named scalars, as far as they were measured and the `--log-*-to-tensorboard` flags ask."""

    config: LogConfig
    world_size: int

    def iteration(self, it: Iteration) -> Iterator[Curves]:
        """All that is known after one iteration."""
        yield ALL_AXES, self._always(it)
        yield ITERATIONS, self._memory(it)
        yield ITERATIONS, timer_scalars(it)
        yield (Axis.ITERATIONS, Axis.TOKENS), optimizer_scalars(it)
        yield ITERATIONS, dict(it.others)

    def interval(self, interval: Interval) -> Iterator[Curves]:
        """All that is known once per log interval."""
        yield (
            ITERATIONS,
            {
                f"{OVERVIEW}1 training loss": interval.loss,
                f"{OVERVIEW}3 tokens per second": interval.tokens_per_second,
                f"{OVERVIEW}4 seconds per step": interval.seconds_per_iteration,
            },
        )
        if self.config.log_timers_to_tensorboard:
            yield ALL_AXES, {"iteration-time/iteration-time": interval.seconds_per_iteration}
        if self.config.log_throughput:
            throughput = {
                "throughput": interval.model_tflops,
                "share-of-measured-matmul-rate": interval.share_of_measured_rate,
                "mfu": interval.mfu,
            }
            yield ITERATIONS, without_none(throughput)
        yield ITERATIONS, communication_scalars(interval.last.communication)

    def validation(self, validation: Validation) -> Iterator[Curves]:
        """The held-out loss and, if asked for, its perplexity."""
        if validation.split == "validation":
            yield ITERATIONS, {f"{OVERVIEW}2 held-out loss": validation.loss}
        name = f"lm-loss-validation/lm loss {validation.split}"
        yield ALL_AXES, {name: validation.loss}
        if self.config.log_validation_ppl_to_tensorboard:
            yield ALL_AXES, {f"{name} ppl": validation.perplexity}

    def _always(self, it: Iteration) -> Scalars:
        config = self.config
        scalars = {
            "learning-rate/learning-rate": it.learning_rate,
            "lm-loss-training/lm loss": it.loss,
            "lm-loss-training/share of empty micro-batches": it.empty_share or None,
            "loss-scale/loss-scale": it.loss_scale,
            "grad-norm/grad-norm": it.grad_norm,
            "num-zeros/num-zeros": it.num_zeros,
            "params-norm/params-norm": it.params_norm,
            "seqlen/actual_seq_length": it.seq_length,
        }
        if config.log_batch_size_to_tensorboard:
            scalars["batch-size/batch-size"] = it.global_batch_size
        if config.log_world_size_to_tensorboard:
            scalars["world-size/world-size"] = self.world_size
        return without_none(scalars)

    def progress(self, it: Iteration) -> dict[Axis, Scalars]:
        """Samples and tokens over iterations, and iterations over each of them."""
        return {
            Axis.ITERATIONS: {
                "steps-vs-samples/y=samples,x=steps": it.consumed_samples,
                "steps-vs-tokens/y=tokens,x=steps": it.consumed_tokens,
            },
            Axis.SAMPLES: {"steps-vs-samples/y=steps,x=samples": it.iteration},
            Axis.TOKENS: {"steps-vs-tokens/y=steps,x=tokens": it.iteration},
        }

    def _memory(self, it: Iteration) -> Scalars:
        """Bytes held by this rank."""
        if it.memory is None or not self.config.log_memory_to_tensorboard:
            return {}
        return without_none(
            {
                "mem-reserved-bytes": it.memory.reserved_bytes,
                "mem-allocated-bytes": it.memory.allocated_bytes,
                "mem-allocated-count": it.memory.allocated_count,
            }
        )


class CurveWriter(Writer):
    """A writer of named scalars, each time with the position that training is at."""

    names: ScalarNames

    @abstractmethod
    def write(self, curves: Iterable[Curves], position: Position) -> None:
        """Write the scalars of `curves` at a position."""

    def iteration(self, iteration: Iteration) -> None:
        """Write everything known after one iteration."""
        self.write(self.names.iteration(iteration), iteration)

    def interval(self, interval: Interval) -> None:
        """Write what is known once per log interval."""
        self.write(self.names.interval(interval), interval.last)

    def validation(self, validation: Validation) -> None:
        """Write a held-out loss."""
        self.write(self.names.validation(validation), validation)


class TensorBoard(CurveWriter):
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
        self.names = names
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
        super().iteration(iteration)
        if len(self._writers) > 1:
            for axis, scalars in self.names.progress(iteration).items():
                self._write_over(axis, scalars, iteration)

    def flush(self) -> None:
        """Bring everything to disk."""
        for writer in self._writers.values():
            writer.flush()

    def close(self) -> None:
        """Flush and close the files."""
        for writer in self._writers.values():
            writer.close()

    def write(self, curves: Iterable[Curves], position: Position) -> None:
        """Write the scalars over each of their axes."""
        for axes, scalars in curves:
            for axis in self._writers.keys() & axes:
                named = {name + axis.suffix: value for name, value in scalars.items()}
                self._write_over(axis, named, position)

    def _write_over(self, axis: Axis, scalars: Mapping[str, float], position: Position) -> None:
        for name, value in scalars.items():
            self._writers[axis].add_scalar(name, value, axis.coordinate(position))


def timer_scalars(it: Iteration) -> Scalars:
    """Seconds of the parts of an iteration."""
    return without_none(
        {
            "forward-backward-time": it.forward_backward_seconds,
            "batch-generator-time": it.batch_generator_seconds,
        }
    )


def optimizer_scalars(it: Iteration) -> Scalars:
    """Norms of weights and moments, e.g. "optimizer/variance_l2"."""
    return {f"optimizer/{kind}_{norm}": value for (kind, norm), value in it.optimizer_norms.items()}


def communication_scalars(communication: Communication | None) -> Scalars:
    """Bytes that a node sent per step, e.g. "comm/gradients_across_nodes"."""
    if communication is None:
        return {}
    keys = [(purpose, hop) for purpose in communication.purposes for hop in HOPS]
    num_bytes = {f"comm/{purpose}_{hop}": communication.sent[purpose, hop] for purpose, hop in keys}
    num_bytes |= {f"comm/{hop}": sum_over(communication.sent, hop) for hop in HOPS}
    num_bytes["comm/expected_across_nodes"] = sum_over(communication.expected, ACROSS_NODES)
    means = {name: total / communication.steps for name, total in num_bytes.items()}
    return means | _coded_scalars(communication.coded)


def plain_scalars(communication: Communication | None) -> Scalars:
    """Bytes per node and step by formula without ZeRO++, e.g. "comm/plain_gradients_in_node"."""
    if communication is None:
        return {}
    return {
        f"comm/plain_{purpose}_{hop}": communication.plain[purpose, hop] / communication.steps
        for purpose in communication.purposes
        for hop in HOPS
    }


def _coded_scalars(coded: CodedMessages) -> Scalars:
    """Bits that a weight and a gradient take in coded messages, scales included."""
    scalars = {}
    if coded.weights:
        scalars["comm/bits_per_weight"] = 8 * coded.weight_bytes / coded.weights
    if coded.gradients:
        scalars["comm/bits_per_gradient"] = 8 * coded.gradient_bytes / coded.gradients
    return scalars


def without_none(scalars: dict[str, float | None]) -> Scalars:
    """The scalars that were measured."""
    return {name: value for name, value in scalars.items() if value is not None}
