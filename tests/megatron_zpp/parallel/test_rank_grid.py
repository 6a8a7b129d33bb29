"""Places of ranks, and who shares what with whom, by the formula of the numbers of ranks."""

from itertools import product

from megatron_zpp.planner.parts.planned_ranks import PlannedRanks
from megatron_zpp.settings.config import ParallelConfig
from zeropp.wire.rank_group import Nodes

P, R, C, T = 2, 3, 2, 2
SIZES = ParallelConfig(
    pipeline_model_parallel_size=P, context_parallel_size=C, tensor_model_parallel_size=T
)


def number(p: int, replica: int, c: int, t: int) -> int:
    """The number of the rank at these places."""
    return ((p * R + replica) * C + c) * T + t


def test_a_rank_knows_its_places_and_who_shares_its_work():
    nodes = Nodes(num_ranks=P * R * C * T, ranks_per_node=4)
    for p, replica, c, t in product(range(P), range(R), range(C), range(T)):
        ranks = PlannedRanks(parallel=SIZES, nodes=nodes, rank=number(p, replica, c, t))
        places = ranks.pipeline_place, ranks.replica, ranks.context_place, ranks.tensor_place
        assert places == (p, replica, c, t)
        assert (ranks.num_ranks, ranks.num_replicas) == (P * R * C * T, R)
        assert ranks.pipeline == tuple(number(each, replica, c, t) for each in range(P))
        assert ranks.tensor_group.members == tuple(number(p, replica, c, i) for i in range(T))
        assert ranks.context_group.members == tuple(number(p, replica, i, t) for i in range(C))
        assert ranks.tensor_group.index == t and ranks.context_group.index == c
