"""Evaluation where nodes come and go: shared by those that have the same weights."""

from collections.abc import Callable, Sequence

from zeropp.optim.local_steps.elastic_steps import ElasticSteps
from zeropp.optim.local_steps.local_steps import LocalSteps


def sum_over_shares(
    local_steps: LocalSteps | None, sums_of: Callable[[int, int], Sequence[float]]
) -> Sequence[float]:
    """Return `sums_of(0, 1)`, sums over the whole; all ranks call it.

    Where nodes come and go and have the same weights, as after an exchange, each has the sums of a
    share, `sums_of(share, shares)`, and gets those of all. Between exchanges nodes do not wait for
    others, and each computes the whole with its own weights.
    """
    if isinstance(local_steps, ElasticSteps) and local_steps.has_peers:
        return local_steps.sum(sums_of)
    return sums_of(0, 1)
