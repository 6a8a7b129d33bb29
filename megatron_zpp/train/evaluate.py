"""The loss on held-out batches, with dropout off."""

import torch

from megatron_zpp.data.loader import Loader
from megatron_zpp.parallel.mesh import Ranks
from zeropp import Sharding


@torch.no_grad()
def evaluate(
    sharding: Sharding, ranks: Ranks, batches: Loader, num_micro_batches: int
) -> tuple[float, float]:
    """Evaluate the next `num_micro_batches` micro-batches of every rank.

    Returns the sum of the losses of tokens, in nats, and how many tokens have one, the same on all
    ranks. Replicas that train independently evaluate the weights that each has; elastic ones sum
    nothing with others here.
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
