"""The training loop, top to bottom: step, log, evaluate, save, stop."""

from megatron_zpp.data.loader import Loader
from megatron_zpp.monitor.metrics import Validation
from megatron_zpp.train.evaluate import evaluate
from megatron_zpp.train.resume import save
from megatron_zpp.train.run import Run
from megatron_zpp.train.step import Underway, begin_iteration, is_due

TRAIN, VALIDATION, TEST = range(3)


def train(run: Run) -> bool:
    """Train from where `run.counters` stands; returns whether the last iteration was reached."""
    config, counters = run.config, run.counters
    if config.evaluation.eval_at_start and counters.iteration == 0:
        held_out(run, VALIDATION, "the start of training")
    with loader(run, TRAIN, counters.consumed_samples) as batches, run.console.live():
        behind = None
        while counters.iteration < run.schedules.length.iterations:
            behind = report(run, behind, begin_iteration(run, batches, behind))
            evaluates = is_due(counters.iteration, config.evaluation.eval_interval)
            reason = run.stopping.reason(counters.iteration, run.ranks)
            saves = bool(reason) or is_due(counters.iteration, config.checkpoint.save_interval)
            if evaluates or saves:
                behind = report(run, behind)
            if evaluates:
                held_out(run, VALIDATION, f"iteration {counters.iteration}")
            if saves:
                save(run)
            if reason:
                run.console.line(f"stopping after iteration {counters.iteration}: {reason}")
                return False
        report(run, behind)
    if counters.iteration != counters.saved_iteration:
        save(run)
    return True


def report(run: Run, behind: Underway | None, begun: Underway | None = None) -> Underway | None:
    """Give the metrics the iteration before; returns `begun` if its own turn is yet to come.

    A GPU so computes an iteration while the host reads the numbers of the one before.
    """
    if behind:
        run.metrics.iteration(behind.measured())
    if begun and not run.ranks.asynchronous:
        run.metrics.iteration(begun.measured())
        return None
    return begun


def held_out(run: Run, split: int, moment: str) -> None:
    """Measure and report the loss on the next `--eval-iters` global batches of a split."""
    config, counters = run.config, run.counters
    if run.datasets[split] is None or config.evaluation.eval_iters == 0:
        return
    samples = config.evaluation.eval_iters * run.schedules.batch_size(counters.consumed_samples)
    consumed = counters.consumed_valid_samples if split == VALIDATION else 0
    if consumed + samples > len(run.datasets[split]):
        consumed = 0  # a checkpoint's evaluations were more or larger than this run's
    per_step = config.batch.micro_batch_size * run.ranks.num_ranks
    with loader(run, split, consumed) as batches:
        loss = evaluate(run.sharding, run.ranks, batches, samples // per_step)
    if split == VALIDATION:
        counters.consumed_valid_samples = consumed + samples
    run.metrics.validation(
        Validation(
            iteration=counters.iteration,
            consumed_samples=counters.consumed_samples,
            consumed_tokens=counters.consumed_tokens,
            loss=loss,
            moment=moment,
            split="validation" if split == VALIDATION else "test",
        )
    )


def loader(run: Run, split: int, consumed_samples: int) -> Loader:
    """Micro-batches of this rank from a split, after `consumed_samples` of all ranks."""
    return Loader(
        run.datasets[split],
        run.config.data,
        consumed_samples=consumed_samples,
        micro_batch_size=run.config.batch.micro_batch_size,
        rank=run.ranks.rank,
        world=run.ranks.num_ranks,
        eod=run.tokenizer.eod,
        device=run.ranks.device,
    )
