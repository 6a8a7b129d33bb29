"""The loss on held-out batches, with dropout off."""

import torch

from megatron_zpp.data.loader import Loader
from megatron_zpp.monitor.metrics import Validation
from megatron_zpp.parallel.mesh import Ranks
from megatron_zpp.train.inputs import VALIDATION
from megatron_zpp.train.run import Run
from zeropp import Sharding


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
    parts = ranks.num_replicas if ranks.replicas.joins_and_leaves else ranks.num_parts
    samples_per_pass = config.batch.micro_batch_size * parts
    passes = num_samples // samples_per_pass

    def sums_of(share: int, shares: int) -> tuple[float, float]:
        own = range(share * passes // shares, (share + 1) * passes // shares)
        with run.batches.loader(split, consumed + own.start * samples_per_pass) as batches:
            return evaluate(run.trainer.sharding, ranks, batches, len(own))

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


@torch.no_grad()
def evaluate(
    sharding: Sharding, ranks: Ranks, batches: Loader, num_micro_batches: int
) -> tuple[float, float]:
    """Evaluate the next `num_micro_batches` micro-batches of every rank.

    Returns the sum of the losses of tokens, in nats, and how many tokens have one, the same on all
    ranks. Replicas that train independently evaluate the weights that each has; those
    that join and leave sum nothing with others here.
    """
    model = sharding.model
    model.eval()
    total, num_tokens = torch.zeros(2, dtype=torch.float64, device=ranks.device)
    for _ in range(num_micro_batches):
        batch = next(batches)
        ranks.main_thread.mark()
        count = batch.loss_mask.sum(dtype=torch.float64)
        total += model(*batch.inputs()) * count
        num_tokens += count
    model.train()
    sharding.release()
    sum_of_losses, sum_of_tokens = ranks.sum_over_replicas(total.item(), num_tokens.item())
    # All ranks count tokens; those that are not at the end of a pipeline have no loss.
    return sum_of_losses, sum_of_tokens * ranks.num_losses / ranks.num_ranks
