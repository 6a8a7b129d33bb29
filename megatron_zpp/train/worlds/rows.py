"""What the table before training says of nodes that step alone."""

from megatron_zpp.monitor.communication import size
from megatron_zpp.parallel.mesh import Ranks
from zeropp.optim.local_steps.local_steps import HOST, LocalSteps
from zeropp.settings.sync_schedule import SyncSchedule


def local_steps_rows(local_steps: LocalSteps, ranks: Ranks) -> list[tuple[str, str]]:
    """Rows that say when nodes exchange, in how many bits, and what a rank keeps for it."""
    options, device = local_steps.options, ranks.device
    of_world = ranks.nodes.ranks_per_node * ranks.nodes.parts
    nodes = -(-ranks.num_ranks // of_world)
    each = "" if nodes == 1 else f" groups of {nodes} nodes"
    agreed = size(sum(each.nbytes for each in local_steps.agreed))
    owned = size(local_steps.momentum.nbytes + local_steps.mean.error.nbytes)
    where = " on the host" if options.on_host and device != HOST else ""
    return [
        (
            "nodes",
            f"{ranks.num_worlds}{each} that step alone, exchange "
            f"{intervals(local_steps.schedule)} in {options.bits} bits\n"
            f"outer learning rate {options.lr:g}, momentum {options.momentum:g}; a rank keeps "
            f"{agreed} of agreed weights{where},\n{owned} of momentum and rounding errors",
        )
    ]


def intervals(schedule: SyncSchedule) -> str:
    """Return when nodes exchange, in words."""
    parts = []
    for start, interval in schedule.phases:
        how = "every step" if interval == 1 else f"every {interval} steps"
        parts.append(f"{how} after step {start:,}" if start else how)
    return ", ".join(parts)
