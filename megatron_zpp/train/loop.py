"""The training loop: step, log, evaluate, save, stop; `--profile` and `--manual-gc`."""

import gc
import statistics
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from megatron_zpp.monitor.log_lines import duration
from megatron_zpp.monitor.metrics import Interval, Iteration, Validation
from megatron_zpp.settings.config import LogConfig, TrainingConfig
from megatron_zpp.settings.scheduled_values import is_due
from megatron_zpp.train.diagnosis import describe_spike, source_of_non_finite
from megatron_zpp.train.inputs import TRAIN, VALIDATION
from megatron_zpp.train.pending_iteration import PendingIteration
from megatron_zpp.train.run import Run
from zeropp import InputError
from zeropp.atomic import write_atomically

TRACES = "profile"  # a folder in --tensorboard-dir


def train(run: Run) -> bool:
    """Train from the counters on; returns whether the last iteration was reached."""
    config, counters, log = run.config, run.trainer.counters, IterationLog(run=run)
    if run.ranks.replicas.join(run):
        evaluates = is_due(counters.iteration, config.evaluation.eval_interval)  # as the others do
    else:
        evaluates = config.evaluation.eval_at_start and counters.iteration == 0
    if evaluates:
        moment = (
            f"iteration {counters.iteration}" if counters.iteration else "the start of training"
        )
        evaluate_split(run, VALIDATION, moment)

    last, stop_reason = run.trainer.schedules.length.iterations, None
    with (
        run.console.live(),
        StepProfiler(config.log, run.ranks.rank) as profiler,
        GarbageCollection(config.training) as garbage,
    ):
        while counters.iteration < last and not stop_reason:
            stop_reason = train_with_these_replicas(run, log, profiler, garbage)
        log.end()
    run.finish_saving()
    if stop_reason:
        run.console.line(f"stopping after iteration {counters.iteration}: {stop_reason}")
    return not stop_reason


def train_with_these_replicas(
    run: Run, log: "IterationLog", profiler: "StepProfiler", garbage: "GarbageCollection"
) -> str | None:
    """Train until the last iteration, or until other replicas take part.

    Returns why the run stops and has been saved, or None.
    """
    config, counters, schedules = run.config, run.trainer.counters, run.trainer.schedules
    ranks, replicas, first_sample = run.ranks, run.ranks.replicas, counters.consumed_samples
    if replicas.joins_and_leaves and not ranks.global_rank and not run.metrics.writers:
        run.open_writers()  # as this replica has become the first one
    present = replicas.membership
    left_out = schedules.batch_size.batches_with(config.data.skipped, first_sample)
    with run.batches.loader(TRAIN, first_sample, left_out) as batches:
        while counters.iteration < schedules.length.iterations:
            profiler.before_iteration(counters.iteration)
            if any(counters.consumed_samples in samples for samples in left_out):
                samples = run.trainer.leave_out()
                run.console.line(
                    f"iteration {counters.iteration} is left out: samples "
                    f"{samples.start}:{samples.stop} (--skip-samples)"
                )
            else:
                log.add(run.trainer.step(batches, log.unread))

            evaluates = is_due(counters.iteration, config.evaluation.eval_interval)
            stop_reason = run.stopping.reason(
                counters.iteration, ranks, aligned=replicas.aligned(counters.iteration)
            )
            saves = stop_reason or is_due(counters.iteration, config.checkpoint.save_interval)
            if evaluates or saves:
                log.end()

            garbage.after_iteration(counters.iteration)
            if evaluates:
                with garbage.around_evaluation():
                    evaluate_split(run, VALIDATION, f"iteration {counters.iteration}")

            if saves:
                run.save()
            else:
                run.log_saving()
            if stop_reason or replicas.membership != present:
                return stop_reason
    return None


def evaluate_split(run: Run, split: int, moment: str) -> None:
    """Log the loss on the next `--eval-iters` global batches of `VALIDATION` or `TEST`, if any.

    `moment` is the log line's description of when this happens.
    """
    config, counters, dataset = run.config, run.trainer.counters, run.batches.datasets[split]
    if dataset is None or config.evaluation.eval_iters == 0:
        return
    batch_size = run.trainer.schedules.batch_size(counters.consumed_samples)
    num_samples = config.evaluation.eval_iters * batch_size
    consumed = counters.consumed_valid_samples if split == VALIDATION else 0
    if consumed + num_samples > len(dataset):
        consumed = 0  # this run has fewer validation samples than the one that saved the checkpoint
    ranks = run.ranks
    parts = ranks.data_parallel_size if ranks.replicas.joins_and_leaves else ranks.num_parts
    samples_per_pass = config.batch.micro_batch_size * parts
    passes = num_samples // samples_per_pass

    def sums_of(share: int, shares: int) -> tuple[float, float]:
        own = range(share * passes // shares, (share + 1) * passes // shares)
        with run.batches.loader(split, consumed + own.start * samples_per_pass) as batches:
            return run.trainer.evaluate(batches, len(own))

    sum_of_losses, num_tokens = ranks.replicas.evaluate(sums_of)
    if split == VALIDATION:
        counters.consumed_valid_samples = consumed + num_samples
    name = "validation" if split == VALIDATION else "test"
    if not num_tokens:
        run.console.line(f"no {name} loss at {moment}: none of the tokens drawn has one")
        return
    run.metrics.validation(
        Validation(
            iteration=counters.iteration,
            consumed_samples=counters.consumed_samples,
            consumed_tokens=counters.consumed_tokens,
            loss=sum_of_losses / num_tokens,
            moment=moment,
            split=name,
        )
    )


@dataclass
class LossWatch:
    """Tells whether a loss is a spike: far above the mean of the iterations before it."""

    WINDOW, LEAST = 100, 20  # iterations: the mean is of the last 100, once there are 20
    DEVIATIONS, SHARE = 6, 0.1  # above the mean by 6 standard deviations and by a tenth

    _recent: deque[float] = field(default_factory=lambda: deque(maxlen=LossWatch.WINDOW))

    def mean_below(self, loss: float) -> float | None:
        """Add a loss; return the mean of those before if it is a spike above them, else None."""
        before = tuple(self._recent)
        self._recent.append(loss)
        if len(before) < self.LEAST:
            return None
        mean = statistics.fmean(before)
        distance = max(self.DEVIATIONS * statistics.pstdev(before, mean), self.SHARE * abs(mean))
        return mean if loss > mean + distance else None


@dataclass(kw_only=True)
class IterationLog:
    """Logs the iterations of a run.

    On a GPU, an iteration is computed while the host logs the one before. `unread` is the last
    iteration if its numbers have not been read.
    """

    run: Run
    loss_watch: LossWatch = field(default_factory=LossWatch)
    unread: PendingIteration | None = None
    _has_announced_save: bool = False
    _has_logged: bool = False
    _unlogged: list[Iteration] = field(default_factory=list)

    def add(self, iteration: PendingIteration) -> None:
        """Add an iteration, which may be logged later than now; log the one before."""
        self.flush()
        self.unread = iteration
        if not self.run.ranks.asynchronous:
            self.flush()

    def flush(self) -> None:
        """Log the iteration that has not been logged, if there is one."""
        if self.unread is not None:
            unread, self.unread = self.unread, None
            self._log(unread)

    def end(self) -> None:
        """Log all iterations; all nodes do so after the same one."""
        self.flush()
        self._write()

    def _write(self) -> None:
        """Write what has not been written, with the means over replicas."""
        iterations, self._unlogged = self._unlogged, []
        for iteration in self._over_replicas(iterations):
            interval = self.run.metrics.iteration(iteration)
            if interval is None and not self._has_logged:
                self.run.console.line(
                    f"iteration {iteration.iteration}: loss {iteration.loss:.4f}; the log goes on "
                    f"every {self.run.config.log.log_interval} iterations"
                )
            self._has_logged = True
            if interval is not None and not self._has_announced_save:
                self._announce_save(interval)

    @property
    def _means_are_shared(self) -> bool:
        replicas = self.run.ranks.replicas
        return replicas.independent and not replicas.joins_and_leaves

    def _over_replicas(self, iterations: Sequence[Iteration]) -> list[Iteration]:
        """Return iterations with means over replicas, all of which call it.

        Replicas that join and leave log their own numbers.
        """
        if not self._means_are_shared or not iterations:
            return [*iterations]
        own = [
            number
            for each in iterations
            for number in (each.loss, each.empty_share, each.grad_norm or 0.0)
        ]
        replicas = self.run.ranks.replicas
        means = iter(total / replicas.count for total in replicas.sum(*own))
        return [
            replace(each, loss=next(means), empty_share=next(means), grad_norm=next(means))
            for each in iterations
        ]

    def _announce_save(self, interval: Interval) -> None:
        """Log when the next checkpoint is due; once, as soon as the time of a step is known."""
        self._has_announced_save = True
        last = interval.last.iteration
        due = self.run.next_save(last - 1)
        if due is not None and due > last:
            seconds = (due - last) * interval.seconds_per_iteration
            self.run.console.line(
                f"next checkpoint after iteration {due}, in about {duration(seconds)}"
            )

    def _log(self, pending: PendingIteration) -> None:
        """Wait for the numbers of an iteration and log them.

        Raises InputError for a loss or a norm that is not finite, and logs a line about a loss that
        is far above those before; both say where it comes from.
        """
        run, iteration, problem = self.run, pending.result(), pending.problem()
        first, end = pending.samples.start, pending.samples.stop
        advice = f"; --skip-samples {first}:{end} on resume leaves this batch out"
        if run.ranks.replicas.joins_and_leaves:  # where that is refused
            advice = ""
        if problem is not None:
            raise InputError(
                f"{problem} at iteration {iteration.iteration}, and no update was made; "
                f"{source_of_non_finite(run.trainer, run.batches, pending)}. Lower --lr, lengthen "
                f"--lr-warmup-iters, lower --clip-grad, or look at the data{advice}"
            )
        self._unlogged.append(iteration)
        is_due = iteration.iteration % run.config.log.log_interval == 0
        if not self._means_are_shared or is_due:
            self._write()
        warning = run.step_watch.warning(iteration.seconds) if run.step_watch else None
        if warning is not None:
            run.console.line(warning)
        mean = self.loss_watch.mean_below(iteration.loss)
        if mean is not None:
            run.console.line(
                f"iteration {iteration.iteration}: the loss {iteration.loss:.4g} is far above the "
                f"mean of {mean:.4g} before; {describe_spike(run.trainer, run.batches, pending)}"
                f"{advice}"
            )


class GarbageCollection(AbstractContextManager):
    """`--manual-gc`: inside, Python's garbage collector runs when it is told to.

    Left to itself it runs on each rank at another time, and the others wait for that rank.
    """

    def __init__(self, config: TrainingConfig) -> None:
        self._manual = config.manual_gc
        self._interval = config.manual_gc_interval or None
        self._around_evaluation = config.manual_gc and not config.no_manual_gc_eval
        self._was_enabled = False

    def __enter__(self) -> "GarbageCollection":
        self._was_enabled = gc.isenabled()
        if self._manual:
            gc.disable()
            gc.collect()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._manual and self._was_enabled:
            gc.enable()

    def after_iteration(self, iteration: int) -> None:
        """Collect if it is time."""
        if self._manual and is_due(iteration, self._interval):
            gc.collect()

    @contextmanager
    def around_evaluation(self) -> Iterator[None]:
        """Collect what training left, and after the block what the evaluation left."""
        if self._around_evaluation:
            gc.collect()
        yield
        if self._around_evaluation:
            gc.collect(generation=0)  # only objects that are younger than the last collection


class StepProfiler:
    """`--profile`: traces the iterations after `--profile-step-start`, up to `--profile-step-end`.

    A trace is for Perfetto, chrome://tracing or TensorBoard.
    Inside the block, `before_iteration` is called with the number of iterations made so far. A run
    that ends or resumes in between traces what it makes of them.
    """

    def __init__(self, config: LogConfig, rank: int) -> None:
        self._range = range(config.profile_step_start, config.profile_step_end)
        self._traces = config.profile and rank in config.profile_ranks
        self._folder = Path(config.tensorboard_dir or "") / TRACES
        self._rank = rank
        self._profile: profile | None = None
        self._first = self._made = 0

    def __enter__(self) -> "StepProfiler":
        return self

    def __exit__(self, *error: object) -> None:
        self._end(self._made + 1)

    def before_iteration(self, made: int) -> None:
        """Begin or end the trace if it is time; `made` is the number of iterations so far."""
        self._made = made
        if not self._traces:
            return
        if made not in self._range:
            self._end(made)
        elif self._profile is None:
            activities = [ProfilerActivity.CPU]
            if torch.cuda.is_available():
                activities.append(ProfilerActivity.CUDA)
            self._first, self._profile = made + 1, profile(activities=activities)
            self._profile.start()

    def _end(self, last: int) -> None:
        if self._profile is None:
            return
        finished, self._profile = self._profile, None
        finished.stop()
        self._folder.mkdir(parents=True, exist_ok=True)
        name = f"rank{self._rank}.iterations-{self._first}-{last}.pt.trace.json"
        path = self._folder / name
        write_atomically(path, lambda file: finished.export_chrome_trace(file.name))
