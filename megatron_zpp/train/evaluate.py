"""The loss on held-out batches, with dropout off."""

from megatron_zpp.monitor.metrics import Validation
from megatron_zpp.train.inputs import VALIDATION
from megatron_zpp.train.run import Run


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
