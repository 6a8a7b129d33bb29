"""What the table before training says of nodes that step alone."""

import logging

from megatron_zpp.monitor.communication import size
from megatron_zpp.parallel.mesh import Ranks
from megatron_zpp.settings.config import Config
from zeropp.optim.local_steps.fragment import HOST
from zeropp.optim.local_steps.local_steps import LocalSteps

log = logging.getLogger("megatron_zpp")


def local_steps_rows(local_steps: LocalSteps, ranks: Ranks) -> list[tuple[str, str]]:
    """Rows that say when nodes exchange, in how many bits, and what a rank keeps for it."""
    options, device = local_steps.options, ranks.device
    of_world = ranks.nodes.ranks_per_node * ranks.nodes.parts
    nodes = -(-ranks.num_ranks // of_world)
    each = "" if nodes == 1 else f" groups of {nodes} nodes"
    fragments = local_steps.fragments
    agreed = size(sum(tensor.nbytes for each in fragments for tensor in each.agreed))
    owned = size(
        sum(
            tensor.nbytes
            for each in fragments
            for tensor in (each.momentum, each.mean.error, *each.mean.unsent)
        )
    )
    where = " on the host" if options.on_host and device != HOST else ""
    return [
        (
            "nodes",
            f"{ranks.num_worlds}{each} that step alone, exchange "
            f"{local_steps.schedule} in {options.bits} bits\n"
            f"outer learning rate {options.lr:g}, momentum {options.momentum:g}; a rank keeps "
            f"{agreed} of agreed weights{where},\n{owned} of momentum and rounding errors",
        )
    ]


def log_without_effect(config: Config, ranks: Ranks) -> None:
    """Log a line that names settings for messages between nodes, where no step sends any."""
    zero, own = config.zero.zero_optimization, config.zero.zeropp
    idle = {
        "zero_hpz_partition_size": zero.zero_hpz_partition_size > 1,
        "zeropp.weight_steps": own.weight_steps,
        "zeropp.code_messages": own.code_messages,
    }
    within = {
        "zero_quantized_weights": zero.zero_quantized_weights,
        "zero_quantized_gradients": zero.zero_quantized_gradients,
    }
    parts = [
        f"{', '.join(names)} {effect}"
        for keys, effect in (
            (idle, "without effect"),
            (within, "only between the ranks of a node"),
        )
        if (names := [name for name, is_set in keys.items() if is_set])
    ]
    if parts and ranks.global_rank == 0:
        log.info(f"nodes step alone, and nothing of a step crosses them: {'; '.join(parts)}")
