"""Ranks on the nodes of an emulated cluster, or on one host as if they were."""

import contextlib
from collections.abc import Iterator

from benchmarks.cluster.network import emulation
from benchmarks.shared.rank_processes import (
    NO_GPUS,
    ORDER_SECONDS,
    RankProcess,
    RankProcesses,
    Target,
    started_ranks,
)

PORT = 29500  # free in every namespace
VARIABLES = {**NO_GPUS, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}


@contextlib.contextmanager
def started_cluster(
    target: Target, nodes: int, ranks_per_node: int, round_trip: float | None
) -> Iterator[RankProcesses]:
    """Start the ranks on nodes with links without a limit, `round_trip` seconds apart.

    They are started without a network if it is None, and killed at the end.
    """
    size = nodes * ranks_per_node
    with contextlib.ExitStack() as stack:
        if round_trip is None:
            ranks = started_ranks(target, size, ranks_per_node, VARIABLES, ORDER_SECONDS)
            yield stack.enter_context(ranks)
            return
        stack.enter_context(emulation.emulated_cluster(nodes, round_trip))
        common = {
            "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": ranks_per_node, "GROUP_WORLD_SIZE": nodes,
            "MASTER_ADDR": emulation.address(0), "MASTER_PORT": PORT,
            **emulation.VARIABLES, **VARIABLES,
        }  # fmt: skip
        processes = []
        for rank in range(size):
            node, local = divmod(rank, ranks_per_node)
            own = common | {"LOCAL_RANK": local, "GROUP_RANK": node}
            processes.append(RankProcess.start(target, rank, own, emulation.prefix(node)))
            stack.callback(processes[-1].kill)
        yield RankProcesses(processes, ORDER_SECONDS)
