"""The training loop: step, log, evaluate, save, stop."""

from megatron_zpp.settings.scheduled_values import is_due
from megatron_zpp.train.evaluate import evaluate_split
from megatron_zpp.train.inputs import TRAIN, VALIDATION
from megatron_zpp.train.iteration_log import IterationLog
from megatron_zpp.train.run import Run


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
    with run.console.live(), run.profiler, run.garbage:
        while counters.iteration < last and not stop_reason:
            stop_reason = train_with_these_replicas(run, log)
        log.end()
    run.finish_saving()
    if stop_reason:
        run.console.line(f"stopping after iteration {counters.iteration}: {stop_reason}")
    return not stop_reason


def train_with_these_replicas(run: Run, log: IterationLog) -> str | None:
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
            run.profiler.before_iteration(counters.iteration)
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

            run.garbage.after_iteration(counters.iteration)
            if evaluates:
                with run.garbage.around_evaluation():
                    evaluate_split(run, VALIDATION, f"iteration {counters.iteration}")

            if saves:
                run.save()
            else:
                run.log_saving()
            if stop_reason or replicas.membership != present:
                return stop_reason
    return None
