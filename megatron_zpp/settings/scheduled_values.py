"""Learning rate, weight decay and batch size as pure functions of the samples consumed so far.

Lengths in iterations or tokens are converted to samples first, through the batch ramp-up, so a run
resumed on another number of ranks continues at the same point. The schedules have no state:
`Schedules.state()` holds their settings, which are compared when a run is resumed.
"""

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any

from megatron_zpp.settings.data import BatchConfig
from megatron_zpp.settings.optimization import OptimizerConfig, ScheduleConfig
from megatron_zpp.settings.run import TrainingConfig
from zeropp.errors import InputError

log = logging.getLogger("megatron_zpp")


@dataclass(frozen=True)
class GlobalBatchSize:
    """Samples of the next step, by the samples consumed before it.

    With a ramp-up of start, increment, n samples: start + int(consumed / (n / steps)) * increment,
    steps = (final - start) / increment, in exact integers; from n samples on the final size. With a
    schedule of (tokens, size) pairs: the size of the last pair whose tokens have been consumed.
    """

    config: BatchConfig
    seq_length: int = 1

    def __call__(self, consumed_samples: int) -> int:
        """Samples of the step that follows `consumed_samples`."""
        if pairs := self.config.batch_sizes:
            consumed = consumed_samples * self.seq_length
            return next(size for tokens, size in reversed(pairs) if tokens <= consumed)
        ramp = self.config.rampup_batch_size
        final = self.final
        if ramp is None or consumed_samples >= ramp[2]:
            return final
        start, increment, samples = ramp
        steps = (final - start) // increment
        return start + consumed_samples * steps // samples * increment

    @property
    def final(self) -> int:
        """Samples of a step after the ramp-up, or of the largest step of a schedule."""
        assert self.config.global_batch_size is not None, "arguments.parse sets the batch size"
        return self.config.global_batch_size

    def samples_after(self, iterations: int) -> int:
        """Samples consumed by the first `iterations` steps."""
        consumed = 0
        for size, steps in self._levels():
            taken = iterations if steps is None else min(steps, iterations)
            consumed += taken * size
            iterations -= taken
        return consumed

    def iterations_within(self, samples: int) -> int:
        """The most steps that together consume no more than `samples`."""
        iterations = 0
        for size, steps in self._levels():
            fitting = samples // size
            taken = fitting if steps is None else min(steps, fitting)
            iterations += taken
            samples -= taken * size
            if taken != steps:
                break
        return iterations

    def batches_with(self, skipped: Sequence[range], consumed_samples: int) -> tuple[range, ...]:
        """The samples of each later batch that has any of the `skipped` ones, from
        `consumed_samples` on."""
        batches = []
        end_of_skipped = max((samples.stop for samples in skipped), default=0)
        while consumed_samples < end_of_skipped:
            end = consumed_samples + self(consumed_samples)
            if any(s.start < end and consumed_samples < s.stop for s in skipped):
                batches.append(range(consumed_samples, end))
            consumed_samples = end
        return tuple(batches)

    def check(self, world_size: int, *, multiple: int = 1) -> None:
        """Raise InputError unless every size on the way divides among ranks and micro-batches.

        The number of micro-batches must be a `multiple` of the ranks of a pipeline.
        """
        micro = self.config.micro_batch_size
        ramp = self.config.rampup_batch_size
        for size, _ in self._levels():
            if size % (micro * world_size):
                where = f" in --rampup-batch-size {' '.join(map(str, ramp))}" if ramp else ""
                where += " in --step-batch-size-schedule" if self.config.batch_sizes else ""
                raise InputError(
                    f"global batch size {size}{where} is not divisible by micro-batch size {micro} "
                    f"x {world_size} data-parallel ranks = {micro * world_size}: "
                    "change --global-batch-size, --micro-batch-size or the number of ranks"
                )
            if (count := size // (micro * world_size)) % multiple:
                raise InputError(
                    f"global batch size {size} is {count} micro-batches on each of {world_size} "
                    f"replicas: several stages per rank need a multiple of the {multiple} ranks of "
                    f"a pipeline, such as {-(-count // multiple) * multiple}"
                )

    def _levels(self) -> Iterator[tuple[int, int | None]]:
        """Each batch size on the way and how many steps it lasts; None: for ever."""
        if pairs := self.config.batch_sizes:
            consumed = 0
            for (_, size), (until, _) in pairwise(pairs):
                steps = max(0, -((consumed * self.seq_length - until) // (size * self.seq_length)))
                yield size, steps
                consumed += steps * size
            yield pairs[-1][1], None
            return
        if self.config.rampup_batch_size is not None:
            consumed = 0
            start, increment, samples = self.config.rampup_batch_size
            num_levels = max((self.final - start) // increment, 1)
            while consumed < samples:
                size = self(consumed)
                level = (size - start) // increment + 1
                until = -(-level * samples // num_levels)  # rounded up; the size is larger then
                steps = -((consumed - until) // size)  # rounded up
                yield size, steps
                consumed += steps * size
        yield self.final, None


@dataclass(frozen=True, kw_only=True)
class Length:
    """The length of a run: the requested `samples`, and `iterations` that consume no more."""

    iterations: int
    samples: int

    @classmethod
    def of(cls, training: TrainingConfig, batch: GlobalBatchSize, seq_length: int) -> "Length":
        """The shortest of the lengths that are set; raises InputError if no step fits."""
        lengths = []
        if training.train_iters is not None:
            lengths.append((batch.samples_after(training.train_iters), "--train-iters"))
        if training.train_samples is not None:
            lengths.append((training.train_samples, "--train-samples"))
        if training.train_tokens is not None:
            lengths.append((training.train_tokens // seq_length, "--train-tokens"))
        assert lengths, "arguments.parse sets a length"
        samples, flag = min(lengths)
        if samples < batch(0):
            raise InputError(
                f"{flag} is worth {samples} samples of {seq_length} tokens, "
                f"less than the {batch(0)} of one step: train longer"
            )
        return cls(iterations=batch.iterations_within(samples), samples=samples)


@dataclass(frozen=True, kw_only=True)
class LearningRate:
    """Warm-up, decay, minimum; lengths in samples."""

    max_lr: float
    min_lr: float
    init_lr: float
    style: str
    warmup: float
    decay: float
    wsd_style: str = "exponential"
    wsd_decay: float = 0.0

    def __call__(self, consumed_samples: float) -> float:
        """The learning rate of the step that follows `consumed_samples`."""
        n = consumed_samples
        if self.warmup > 0 and n <= self.warmup:
            return self.init_lr + (self.max_lr - self.init_lr) * n / self.warmup
        if self.style == "constant":
            return self.max_lr
        if n > self.decay:
            return self.min_lr
        if self.style == "inverse-square-root":
            return max(self.min_lr, self.max_lr * math.sqrt(max(self.warmup, 1) / max(n, 1)))
        return self.min_lr + self._share(n) * (self.max_lr - self.min_lr)

    def _share(self, n: float) -> float:
        """The share of the way from the minimum to the maximum, from 1 to 0."""
        if self.style == "WSD":
            progress = (n - (self.decay - self.wsd_decay)) / (self.wsd_decay or 1)
            return _shape(self.wsd_style, max(progress, 0.0))
        return _shape(self.style, (n - self.warmup) / (self.decay - self.warmup))


@dataclass(frozen=True, kw_only=True)
class WeightDecay:
    """Weight decay growing from `start` to `end` over `length` samples."""

    start: float
    end: float
    style: str
    length: float

    def __call__(self, consumed_samples: float) -> float:
        """The weight decay of the step that follows `consumed_samples`."""
        if self.style == "constant" or consumed_samples >= self.length:
            return self.end
        remaining = _shape(self.style, consumed_samples / self.length)
        return self.start + (1 - remaining) * (self.end - self.start)


@dataclass(frozen=True, kw_only=True)
class Schedules:
    """Everything about a run that depends on the samples consumed.

    `ends_learning_rate` is that of the token embedding and the output layer, None: as the others.
    """

    length: Length
    batch_size: GlobalBatchSize
    learning_rate: LearningRate
    ends_learning_rate: LearningRate | None
    weight_decay: WeightDecay

    @classmethod
    def of(
        cls,
        batch: BatchConfig,
        seq_length: int,
        training: TrainingConfig,
        schedule: ScheduleConfig,
        optimizer: OptimizerConfig,
    ) -> "Schedules":
        """Raises InputError for a run shorter than a step and a warm-up longer than the decay."""
        batch_size = GlobalBatchSize(batch, seq_length)
        length = Length.of(training, batch_size, seq_length)
        learning_rate, ends = _learning_rate(schedule, batch_size, length, seq_length), None
        decay, style = optimizer.weight_decay, optimizer.weight_decay_incr_style
        start, end = optimizer.start_weight_decay, optimizer.end_weight_decay
        if schedule.decoupled_lr is not None:
            lowest = schedule.decoupled_min_lr
            ends = replace(
                learning_rate,
                max_lr=schedule.decoupled_lr,
                min_lr=schedule.min_lr if lowest is None else lowest,
            )
        return cls(
            length=length,
            batch_size=batch_size,
            learning_rate=learning_rate,
            ends_learning_rate=ends,
            weight_decay=WeightDecay(
                start=decay if start is None else start,
                end=decay if end is None else end,
                style=style,
                length=float(0 if style == "constant" else length.samples),
            ),
        )

    def state(self) -> dict[str, Any]:
        """The settings of the schedules as plain values, for a checkpoint."""
        ends = self.ends_learning_rate
        return {
            "learning_rate": asdict(self.learning_rate),
            "weight_decay": asdict(self.weight_decay),
            **({"ends_learning_rate": asdict(ends)} if ends else {}),
        }

    def resumed(self, saved: Mapping[str, Any], config: ScheduleConfig) -> "Schedules":
        """These schedules, or the saved ones with --use-checkpoint-opt_param-scheduler.

        Raises InputError if they differ and neither that flag nor --override-opt_param-scheduler
        chooses between them. An imported checkpoint has no schedules: these are used.
        """
        if "learning_rate" not in saved:
            if config.use_checkpoint_opt_param_scheduler:
                raise InputError(
                    "--use-checkpoint-opt_param-scheduler: the checkpoint was imported from "
                    "another program, without its schedule: give the schedule's flags"
                )
            return self
        state, saved = self.state(), {"ends_learning_rate": {}, **saved}
        differing = [
            f"{part} {name}: {now.get(name)} now, {saved[part].get(name)} in the checkpoint"
            for part, now in {"ends_learning_rate": {}, **state}.items()
            for name in now or saved[part]
            if now.get(name) != saved[part].get(name)
        ]
        if not differing or config.override_opt_param_scheduler:
            for line in differing:
                log.info("%s (--override-opt_param-scheduler: the first is used)", line)
            return self
        if not config.use_checkpoint_opt_param_scheduler:
            raise InputError(
                f"the schedule differs from the checkpoint's ({'; '.join(differing)}): "
                "--override-opt_param-scheduler takes the new one, "
                "--use-checkpoint-opt_param-scheduler the saved one"
            )
        for line in differing:
            log.info("%s (--use-checkpoint-opt_param-scheduler: the second is used)", line)
        ends = saved["ends_learning_rate"]
        return replace(
            self,
            learning_rate=LearningRate(**saved["learning_rate"]),
            weight_decay=WeightDecay(**saved["weight_decay"]),
            ends_learning_rate=LearningRate(**ends) if ends else None,
        )


def _shape(style: str, progress: float) -> float:
    """The remaining share of a decay, from 1 at `progress` 0 to 0 at `progress` 1."""
    if style == "linear":
        return 1 - progress
    if style == "cosine":
        return 0.5 * (math.cos(math.pi * progress) + 1)
    if style == "exponential":
        return 2 * 0.5**progress - 1
    assert style == "minus_sqrt", style
    return 1 - math.sqrt(progress)


def _learning_rate(
    config: ScheduleConfig, batch: GlobalBatchSize, length: Length, seq_length: int
) -> LearningRate:
    def samples(kind: str) -> float | None:
        """The length of a kind ("decay", "warmup", "wsd_decay") in samples, if one is set."""
        for unit, size in (("tokens", seq_length), ("samples", 1)):
            length = getattr(config, f"lr_{kind}_{unit}", None)
            if length:
                return length / size
        iterations = getattr(config, f"lr_{kind}_iters")
        return batch.samples_after(iterations) if iterations else None

    decay = samples("decay") or float(length.samples)
    warmup = samples("warmup") or (config.lr_warmup_fraction or 0.0) * decay
    wsd_decay = samples("wsd_decay") or 0.0
    if warmup > decay:
        raise InputError(
            f"the warm-up of {warmup:.15g} samples is longer than the decay of {decay:.15g}: "
            "shorten --lr-warmup-* or lengthen --lr-decay-* (default: the whole run)"
        )
    if config.lr_decay_style == "WSD" and warmup + wsd_decay > decay:
        raise InputError(
            f"--lr-wsd-decay-* of {wsd_decay:.15g} samples and the warm-up of {warmup:.15g} do not "
            f"fit into the decay of {decay:.15g}: shorten one of them"
        )
    return LearningRate(
        max_lr=config.lr,
        min_lr=config.min_lr,
        init_lr=config.lr_warmup_init,
        style=config.lr_decay_style,
        warmup=float(warmup),
        decay=float(0 if config.lr_decay_style == "constant" else decay),  # unused
        wsd_style=config.lr_wsd_decay_style,
        wsd_decay=float(wsd_decay),
    )


def is_due(iteration: int, interval: int | None) -> bool:
    """Whether to do after `iteration` what is done every `interval` iterations; None: never."""
    return interval is not None and iteration % interval == 0
