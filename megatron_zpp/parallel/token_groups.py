"""The ranks that have other tokens than this one, over which tokens are counted."""

from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class TokenGroups:
    """Ranks that compute the same layers on different tokens.

    samples: those that have parts of this rank's samples, `num_parts` with it. batch: those that
    have parts of the global batch, `num_ranks`. None: no other ranks. context_size: over how many
    ranks gradients are averaged that are terms of a sum. is_counted: this rank's tokens count; of
    tensor ranks that have the same tokens, only those of the first one do.
    """

    samples: dist.ProcessGroup | None = None
    num_parts: int = 1
    batch: dist.ProcessGroup | None = None
    num_ranks: int = 1
    context_size: int = 1
    is_counted: bool = True

    def sum_over_samples(self, counts: Tensor) -> Tensor:
        """Return the sum of integer counts over the ranks that have parts of the same samples."""
        return _sum(counts, self.samples)

    def sum_over_batch(self, counts: Tensor) -> Tensor:
        """Return the sum of integer counts over all ranks with parts of the global batch."""
        return _sum(counts, self.batch)


ONE_RANK = TokenGroups()


def _sum(counts: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    if group is None:
        return counts
    total = counts.clone()
    dist.all_reduce(total, group=group)
    return total
