"""What all nodes log together, where each steps alone."""

from collections.abc import Sequence
from dataclasses import replace

from megatron_zpp.monitor.metrics import Iteration
from megatron_zpp.parallel.mesh import Ranks


def over_worlds(iterations: Sequence[Iteration], ranks: Ranks) -> list[Iteration]:
    """Return iterations with means over nodes that step alone, all of which call it.

    Nodes that come and go log their own numbers.
    """
    if ranks.all_meet is None or not iterations:
        return [*iterations]
    own = [
        number
        for each in iterations
        for number in (each.loss, each.empty_share, each.grad_norm or 0.0)
    ]
    means = iter(total / ranks.num_worlds for total in ranks.all_meet.sum(*own))
    return [
        replace(each, loss=next(means), empty_share=next(means), grad_norm=next(means))
        for each in iterations
    ]
