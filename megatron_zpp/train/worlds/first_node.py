"""The first node that takes part writes the curves; where it may end, another one goes on."""

from megatron_zpp.monitor.writers import open_writers
from megatron_zpp.train.run import Run


def keep_writers(run: Run) -> None:
    """Write the curves from here on if this node has become the first one."""
    ranks, metrics = run.ranks, run.metrics
    if ranks.elastic is None or ranks.global_rank or metrics.has_writers:
        return
    metrics.use_writers(
        open_writers(
            run.config.log, rank=0, world_size=ranks.num_ranks, resumed_at=run.trainer.counters
        )
    )
