"""What iterations measure, and where these numbers go: to the log, the screen and writers.

The training step returns numbers; `log_lines.py` turns them into lines.
"""

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from megatron_zpp.model.flops import TokenFlops
from megatron_zpp.monitor.communication import Communication
from megatron_zpp.monitor.matmul_rate import MatmulRate
from megatron_zpp.monitor.memory import MemoryUse
from megatron_zpp.monitor.report.run_record import RunFacts
from megatron_zpp.settings.config import LogConfig

if TYPE_CHECKING:
    from megatron_zpp.monitor.console import Console
    from megatron_zpp.monitor.log_lines import MegatronLines, ShortLines

LOSSES = ("first_loss", "last_loss", "first_held_out", "last_held_out")
RECENT = 20  # iterations that the last training loss averages
PERPLEXITY_EXPONENT = 20  # Megatron caps the exponent, so that an untrained model prints a number


@dataclass(frozen=True, kw_only=True)
class Iteration:
    """What one iteration measured; None where it was not measured.

    `loss` is the mean over micro-batches and ranks, `empty_share` the share of the micro-batches
    in which no token has a loss, `seconds` the wall time, `consumed_*` the counts after this
    iteration, `skipped` true if the update was left out (fp16 overflow),
    `communication` what the nodes sent since the last log line, measured where a line is due,
    `optimizer_norms` the norms of weights and moments by (tensor, norm), `others` what
    capabilities measured, by name.
    """

    iteration: int
    train_iters: int
    consumed_samples: int
    consumed_tokens: int
    seconds: float
    learning_rate: float
    global_batch_size: int
    seq_length: int
    loss: float
    empty_share: float = 0.0
    loss_scale: float | None = None
    grad_norm: float | None = None
    num_zeros: float | None = None
    params_norm: float | None = None
    skipped: bool = False
    memory: MemoryUse | None = None
    communication: Communication | None = None
    forward_backward_seconds: float | None = None
    batch_generator_seconds: float | None = None  # spent waiting for samples
    optimizer_norms: Mapping[tuple[str, str], float] = field(default_factory=dict)
    others: Mapping[str, float] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        """Tokens of this iteration's global batch."""
        return self.global_batch_size * self.seq_length


@dataclass(frozen=True, kw_only=True)
class Interval:
    """Averages and sums over `--log-interval` iterations, and the last of these iterations."""

    last: Iteration
    loss: float
    seconds_per_iteration: float
    skipped: int
    nan: int
    samples_per_second: float
    tokens_per_second: float  # of all ranks
    tokens_per_gpu_per_second: float
    tflops: float  # per rank, what is recomputed included
    model_tflops: float  # the same without it
    share_of_measured_rate: float | None = None  # None where the rate was not measured
    mfu: float | None = None  # None where the data sheet's peak of the device is not known
    empty_share: float = 0.0  # of micro-batches without a token that has a loss


@dataclass(frozen=True, kw_only=True)
class Validation:
    """A held-out loss after `iteration`.

    `split` is "validation" or "test", `moment` says when in the log line: "iteration 100", "the end
    of training for test data".
    """

    iteration: int
    consumed_samples: int
    consumed_tokens: int
    loss: float
    moment: str
    split: str = "validation"

    @property
    def perplexity(self) -> float:
        """e to the loss, the exponent capped at 20."""
        return math.exp(min(self.loss, PERPLEXITY_EXPONENT))  # in this order NaN stays NaN


@dataclass(kw_only=True)
class History:
    """The first and the latest losses; checkpoints keep them across a resume."""

    first_loss: float | None = None
    last_loss: float | None = None  # mean of the last `RECENT` iterations
    first_held_out: float | None = None
    last_held_out: float | None = None
    tokens: int = 0  # of this process, as are the seconds
    seconds: float = 0.0

    def state_dict(self) -> dict[str, float | None]:
        """The losses, without this process's tokens and seconds."""
        return {name: getattr(self, name) for name in LOSSES}

    def load_state_dict(self, state: Mapping[str, float | None]) -> None:
        """Take over the losses of `state_dict`."""
        for name in LOSSES:
            setattr(self, name, state[name])

    @property
    def tokens_per_second(self) -> float:
        """Of all ranks together, evaluation and saving left out; 0 before the first iteration."""
        return self.tokens / self.seconds if self.seconds else 0.0


class Writer:
    """Where numbers go besides the log; a writer leaves out the methods it has no use for."""

    def iteration(self, iteration: Iteration) -> None: ...
    def interval(self, interval: Interval) -> None: ...
    def validation(self, validation: Validation) -> None: ...
    def describe(self, facts: RunFacts) -> None: ...
    def sample(self, text: str) -> None: ...
    def flush(self) -> None: ...
    def close(self) -> None: ...


class Metrics:
    """Collects iterations, logs every `log_interval`, feeds the screen and the writers."""

    def __init__(
        self,
        config: LogConfig,
        screen: "Console",
        lines: "MegatronLines | ShortLines",
        *,
        world_size: int,
        flops: TokenFlops,
        rate: MatmulRate | None = None,
        writers: Sequence[Writer] = (),
    ) -> None:
        self.history = History()
        self._config = config
        self._screen, self._lines = screen, lines
        self._world_size = world_size
        self._flops = flops
        self.matmul_rate = rate
        self.writers = tuple(writers)
        self._pending: list[Iteration] = []
        self._recent: deque[float] = deque(maxlen=RECENT)
        self._memory_reported = False
        self._facts: Callable[[], RunFacts] | None = None

    def use_facts(self, facts: Callable[[], RunFacts]) -> None:
        """Let the writers get what `facts` says of the run, with the next log line."""
        self._facts = facts

    def iteration(self, iteration: Iteration) -> Interval | None:
        """Add one iteration; returns the interval it completes, after logging it."""
        self._pending.append(iteration)
        self._update_history(iteration)
        self._screen.progress(iteration)
        if iteration.iteration % self._config.tensorboard_log_interval == 0:
            for writer in self.writers:
                writer.iteration(iteration)
        if iteration.iteration % self._config.log_interval != 0:
            return None
        interval = summarize(self._pending, self._world_size, self._flops, self.matmul_rate)
        self._pending = []
        for line in self._lines.interval(interval):
            self._screen.line(line)
        self._report_memory(iteration)
        self._describe()
        for writer in self.writers:
            writer.interval(interval)
        return interval

    def validation(self, validation: Validation) -> None:
        """Print a held-out loss and feed it to screen and writers."""
        for line in self._lines.validation(validation):
            self._screen.line(line)
        if validation.split == "validation":
            self._screen.held_out(validation.loss)
            self.history.last_held_out = validation.loss
            if self.history.first_held_out is None:
                self.history.first_held_out = validation.loss
        for writer in self.writers:
            writer.validation(validation)

    def sample(self, text: str) -> None:
        """Feed the text that the model generated to the writers."""
        self._describe()
        for writer in self.writers:
            writer.sample(text)

    def flush(self) -> None:
        """Bring everything written so far to disk; to be called when a checkpoint is saved."""
        for writer in self.writers:
            writer.flush()

    def close(self) -> None:
        """Flush and close the writers."""
        self._describe()
        for writer in self.writers:
            writer.close()

    def _describe(self) -> None:
        if self._facts is None or not self.writers:
            return
        facts, self._facts = self._facts, None
        for writer in self.writers:
            writer.describe(facts())

    def _update_history(self, iteration: Iteration) -> None:
        history = self.history
        history.tokens += iteration.tokens
        history.seconds += iteration.seconds
        if history.first_loss is None:
            history.first_loss = iteration.loss
        self._recent.append(iteration.loss)
        history.last_loss = sum(self._recent) / len(self._recent)

    def _report_memory(self, iteration: Iteration) -> None:
        memory = iteration.memory
        if self._memory_reported or memory is None or memory.allocated_count is None:
            return
        self._screen.line(self._lines.memory(self._screen.rank, memory, iteration.iteration))
        self._memory_reported = True


def summarize(
    iterations: Sequence[Iteration],
    world_size: int,
    flops: TokenFlops,
    rate: MatmulRate | None = None,
) -> Interval:
    """Average the losses, add up the time and count what was skipped or not finite."""
    last = iterations[-1]
    seconds = sum(each.seconds for each in iterations)
    tokens_per_second = sum(each.tokens for each in iterations) / seconds
    tokens_per_gpu_per_second = tokens_per_second / world_size
    model_flops = tokens_per_gpu_per_second * flops.model
    num_samples = sum(each.global_batch_size for each in iterations)
    num_empty = sum(each.empty_share * each.global_batch_size for each in iterations)
    return Interval(
        last=last,
        loss=sum(each.loss for each in iterations) / len(iterations),
        seconds_per_iteration=seconds / len(iterations),
        skipped=sum(each.skipped for each in iterations),
        nan=sum(not math.isfinite(each.loss) for each in iterations),
        samples_per_second=num_samples / seconds,
        tokens_per_second=tokens_per_second,
        tokens_per_gpu_per_second=tokens_per_gpu_per_second,
        tflops=tokens_per_gpu_per_second * flops.performed / 1e12,
        model_tflops=model_flops / 1e12,
        share_of_measured_rate=model_flops / rate.measured if rate else None,
        mfu=model_flops / rate.peak if rate and rate.peak else None,
        empty_share=num_empty / num_samples,
    )
