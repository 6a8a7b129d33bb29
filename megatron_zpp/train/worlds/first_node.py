"""The first node that takes part writes the curves; where it ends, the next one goes on."""

from megatron_zpp.monitor.metrics import Metrics
from megatron_zpp.monitor.tensorboard_names import Position
from megatron_zpp.monitor.writers import open_writers
from megatron_zpp.parallel.mesh import Ranks
from megatron_zpp.settings.config import LogConfig


def keep_writers(config: LogConfig, ranks: Ranks, metrics: Metrics, position: Position) -> None:
    """Write the curves from a position on if this node has become the first one."""
    if ranks.elastic is None or ranks.global_rank or metrics.has_writers:
        return
    metrics.use_writers(
        open_writers(config, rank=0, world_size=ranks.num_ranks, resumed_at=position)
    )
