"""The training loop: step, log, evaluate, save, stop."""

from megatron_zpp.monitor.metrics import Validation
from megatron_zpp.monitor.step_profiler import StepProfiler
from megatron_zpp.train.batches import TRAIN, VALIDATION, loader
from megatron_zpp.train.diagnosis import describe_spike, source_of_non_finite
from megatron_zpp.train.evaluate import evaluate
from megatron_zpp.train.garbage_collection import GarbageCollection
from megatron_zpp.train.pending_iteration import PendingIteration
from megatron_zpp.train.resume import finish_save, save
from megatron_zpp.train.run import Run, is_due
from megatron_zpp.train.step import train_step
from zeropp import InputError


def train(run: Run) -> bool:
    """Train from `run.counters` on; returns whether the last iteration was reached.

    On a GPU, an iteration is computed while the host logs the one before: `pending` is the
    iteration whose numbers have not been read yet.
    """
    config, counters = run.config, run.counters
    if config.evaluation.eval_at_start and counters.iteration == 0:
        evaluate_split(run, VALIDATION, "the start of training")
    skipped = run.schedules.batch_size.batches_with(config.data.skipped, counters.consumed_samples)
    with (
        loader(run, TRAIN, counters.consumed_samples, skipped) as batches,
        run.console.live(),
        StepProfiler(config.log, run.ranks.rank) as profiler,
        GarbageCollection(config.training) as garbage,
    ):
        pending: PendingIteration | None = None
        while counters.iteration < run.schedules.length.iterations:
            profiler.before_iteration(counters.iteration)
            if any(counters.consumed_samples in samples for samples in skipped):
                leave_out_batch(run)
            else:
                previous, pending = pending, train_step(run, batches, pending)
                log_iteration(run, previous)
            if not run.ranks.asynchronous:
                log_iteration(run, pending)
                pending = None
            evaluates = is_due(counters.iteration, config.evaluation.eval_interval)
            stop_reason = run.stopping.reason(counters.iteration, run.ranks)
            saves = stop_reason or is_due(counters.iteration, config.checkpoint.save_interval)
            if evaluates or saves:
                log_iteration(run, pending)
                pending = None
            garbage.after_iteration(counters.iteration)
            if evaluates:
                with garbage.around_evaluation():
                    evaluate_split(run, VALIDATION, f"iteration {counters.iteration}")
            if saves:
                save(run)
            elif run.async_writer is not None:
                run.async_writer.log_progress()
            if stop_reason:
                finish_save(run)
                run.console.line(f"stopping after iteration {counters.iteration}: {stop_reason}")
                return False
        log_iteration(run, pending)
    if counters.iteration != counters.saved_iteration:
        save(run)
    finish_save(run)
    return True


def leave_out_batch(run: Run) -> None:
    """Count an iteration, as one without an update, whose samples are in `--skip-samples`."""
    counters = run.counters
    first = counters.consumed_samples
    size = run.schedules.batch_size(first)
    counters.advance(size, run.config.model.seq_length, skipped=True)
    run.console.line(
        f"iteration {counters.iteration} is left out: samples {first}:{first + size} "
        "(--skip-samples)"
    )


def log_iteration(run: Run, pending: PendingIteration | None) -> None:
    """Wait for the numbers of a pending iteration, if there is one, and log them.

    Raises InputError for a loss or a norm that is not finite, and logs a line about a loss that is
    far above those before; both say where it comes from.
    """
    if pending is None:
        return
    iteration, samples = pending.result(), f"{pending.samples.start}:{pending.samples.stop}"
    problem = pending.problem()
    if problem is not None:
        raise InputError(
            f"{problem} at iteration {iteration.iteration}, and no update was made; "
            f"{source_of_non_finite(run, pending)}. Lower --lr, lengthen --lr-warmup-iters, lower "
            f"--clip-grad, or look at the data; then resume from the last checkpoint, with "
            f"--skip-samples {samples} without this batch"
        )
    run.metrics.iteration(iteration)
    warning = run.step_watch.warning(iteration.seconds) if run.step_watch else None
    if warning is not None:
        run.console.line(warning)
    mean = run.loss_watch.mean_below(iteration.loss)
    if mean is not None:
        run.console.line(
            f"iteration {iteration.iteration}: the loss {iteration.loss:.4g} is far above the mean "
            f"of {mean:.4g} before; {describe_spike(run, pending)}; --skip-samples {samples} on "
            "resume leaves this batch out"
        )


def evaluate_split(run: Run, split: int, moment: str) -> None:
    """Log the loss on the next `--eval-iters` global batches of `VALIDATION` or `TEST`, if any.

    `moment` is the log line's description of when this happens.
    """
    config, counters = run.config, run.counters
    if run.datasets[split] is None or config.evaluation.eval_iters == 0:
        return
    num_samples = config.evaluation.eval_iters * run.schedules.batch_size(counters.consumed_samples)
    consumed = counters.consumed_valid_samples if split == VALIDATION else 0
    if consumed + num_samples > len(run.datasets[split]):
        consumed = 0  # this run has fewer validation samples than the one that saved the checkpoint
    samples_per_pass = config.batch.micro_batch_size * run.ranks.num_replicas
    with loader(run, split, consumed) as batches:
        loss = evaluate(run.sharding, run.ranks, batches, num_samples // samples_per_pass)
    if split == VALIDATION:
        counters.consumed_valid_samples = consumed + num_samples
    name = "validation" if split == VALIDATION else "test"
    if loss is None:
        run.console.line(f"no {name} loss at {moment}: none of the tokens drawn has one")
        return
    run.metrics.validation(
        Validation(
            iteration=counters.iteration,
            consumed_samples=counters.consumed_samples,
            consumed_tokens=counters.consumed_tokens,
            loss=loss,
            moment=moment,
            split=name,
        )
    )
