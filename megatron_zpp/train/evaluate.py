"""The loss on held-out batches, with dropout off."""

import torch

from megatron_zpp.data.loader import Loader
from megatron_zpp.parallel.mesh import Ranks
from zeropp import Sharding


@torch.no_grad()
def evaluate(sharding: Sharding, ranks: Ranks, batches: Loader, num_micro_batches: int) -> float:
    """Return the mean loss over the next `num_micro_batches` micro-batches of every rank.

    In nats per token, the same on all ranks.
    """
    model = sharding.model
    model.eval()
    total = torch.zeros((), dtype=torch.float64, device=ranks.device)
    for _ in range(num_micro_batches):
        batch = next(batches)
        ranks.main_thread.mark()
        total += model(*batch.inputs())
    model.train()
    sharding.release()
    (sum_of_ranks,) = ranks.sum(total.item())
    return sum_of_ranks / (num_micro_batches * ranks.num_losses)
