"""The training loop: step, log, evaluate, save, stop."""

from megatron_zpp.monitor.writers import open_writers
from megatron_zpp.settings.scheduled_values import is_due
from megatron_zpp.train.evaluate import evaluate_split
from megatron_zpp.train.inputs import TRAIN, VALIDATION
from megatron_zpp.train.iteration_log import IterationLog
from megatron_zpp.train.run import Run


def train(run: Run) -> bool:
    """Train from the counters on; returns whether the last iteration was reached."""
    config, counters, log = run.config, run.trainer.counters, IterationLog(run=run)
    has_joined = run.trainer.join(run.metrics.history, run.batches)
    if has_joined and is_due(counters.iteration, config.evaluation.eval_interval):
        evaluate_split(run, VALIDATION, f"iteration {counters.iteration}")  # as the others do
    if config.evaluation.eval_at_start and counters.iteration == 0:
        evaluate_split(run, VALIDATION, "the start of training")

    last, stop_reason = run.trainer.schedules.length.iterations, None
    with run.console.live(), run.profiler, run.garbage:
        while counters.iteration < last and not stop_reason:
            keep_writers(run)
            stop_reason = train_with_these_replicas(run, log)
        if stop_reason:
            run.saver.finish()
            run.console.line(f"stopping after iteration {counters.iteration}: {stop_reason}")
            return False
        log.end()

    if counters.iteration != counters.saved_iteration:
        run.saver.save()
    run.saver.finish()
    return True


def train_with_these_replicas(run: Run, log: IterationLog) -> str | None:
    """Train until the last iteration, or until other replicas take part.

    Returns why the run stops and has been saved, or None.
    """
    config, counters, schedules = run.config, run.trainer.counters, run.trainer.schedules
    replicas, first_sample = run.ranks.replicas, counters.consumed_samples
    present = replicas.membership
    left_out = schedules.batch_size.batches_with(config.data.skipped, first_sample)
    with run.batches.loader(TRAIN, first_sample, left_out) as batches:
        while counters.iteration < schedules.length.iterations:
            run.profiler.before_iteration(counters.iteration)
            if any(counters.consumed_samples in samples for samples in left_out):
                leave_out_batch(run)
            else:
                log.add(run.trainer.step(batches, log.unread))

            evaluates = is_due(counters.iteration, config.evaluation.eval_interval)
            stop_reason = run.stopping.reason(
                counters.iteration, run.ranks, aligned=replicas.aligned(counters.iteration)
            )
            saves = stop_reason or is_due(counters.iteration, config.checkpoint.save_interval)
            if evaluates or saves:
                log.end()

            run.garbage.after_iteration(counters.iteration)
            if evaluates:
                with run.garbage.around_evaluation():
                    evaluate_split(run, VALIDATION, f"iteration {counters.iteration}")

            if saves:
                run.saver.save()
            else:
                run.saver.log_progress()
            if stop_reason or replicas.membership != present:
                return stop_reason
    return None


def keep_writers(run: Run) -> None:
    """Write the curves from here on if this replica has become the first one, as that one left."""
    ranks, metrics = run.ranks, run.metrics
    if ranks.replicas.joins_and_leaves and not ranks.global_rank and not metrics.writers:
        writers = open_writers(
            run.config.log, rank=0, world_size=ranks.num_ranks, resumed_at=run.trainer.counters
        )
        metrics.use_writers(writers)


def leave_out_batch(run: Run) -> None:
    """Count an iteration, as one without an update, whose samples are in `--skip-samples`."""
    counters = run.trainer.counters
    first = counters.consumed_samples
    size = run.trainer.schedules.batch_size(first)
    counters.advance(size, run.config.model.seq_length, skipped=True)
    run.trainer.end_step()
    run.console.line(
        f"iteration {counters.iteration} is left out: samples {first}:{first + size} "
        "(--skip-samples)"
    )
