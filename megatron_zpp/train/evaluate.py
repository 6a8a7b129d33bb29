"""The loss on held-out batches, with dropout off."""

import torch

from megatron_zpp.data.loader import Loader
from megatron_zpp.parallel.mesh import Ranks
from zeropp import Sharding


@torch.no_grad()
def evaluate(
    sharding: Sharding,
    ranks: Ranks,
    batches: Loader,
    num_micro_batches: int,
    *,
    per_token: bool = False,
) -> float:
    """Return the mean loss over the next `num_micro_batches` micro-batches of every rank.

    In nats per token, the same on all ranks. `per_token`: a micro-batch counts as much as it has
    tokens with a loss.
    """
    model = sharding.model
    model.eval()
    total, weight = torch.zeros(2, dtype=torch.float64, device=ranks.device)
    for _ in range(num_micro_batches):
        batch = next(batches)
        ranks.main_thread.mark()
        share = batch.loss_mask.sum(dtype=torch.float64) if per_token else 1.0
        total += model(*batch.inputs()) * share
        weight += share
    model.train()
    sharding.release()
    sum_of_losses, sum_of_weights = ranks.sum(total.item(), weight.item())
    return sum_of_losses / (sum_of_weights * ranks.num_losses / ranks.num_ranks)
