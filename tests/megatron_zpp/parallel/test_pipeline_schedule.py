"""The order of passes, complete, without a deadlock and few in flight; the places of ranks."""

from itertools import product
from types import SimpleNamespace

import pytest

from megatron_zpp.parallel.pipeline_schedule import Pass, passes, waiting_share
from megatron_zpp.planner.parts.planned_ranks import PlannedRanks
from megatron_zpp.settings.config import ParallelConfig
from zeropp.wire.rank_group import Nodes

SIZES = [
    (ranks, count, chunks)
    for ranks, count, chunks in product((2, 3, 4), (1, 2, 3, 4, 6, 8, 12), (1, 2, 3))
    if chunks == 1 or count % ranks == 0
]


@pytest.mark.parametrize(("ranks", "count", "chunks"), SIZES)
def test_every_stage_sees_every_micro_batch_once_in_each_direction(ranks, count, chunks):
    everything = {
        Pass(forward, chunk, number)
        for forward, chunk, number in product((True, False), range(chunks), range(count))
    }
    for rank in range(ranks):
        order = passes(rank, ranks, count, chunks)
        assert len(order) == len(everything) and set(order) == everything


@pytest.mark.parametrize(("ranks", "count", "chunks"), SIZES)
def test_no_rank_waits_for_ever(ranks, count, chunks):
    """Each rank runs its next pass as soon as what it needs has been computed."""
    left = [passes(rank, ranks, count, chunks) for rank in range(ranks)]
    done: set[tuple[bool, int, int]] = set()  # direction, stage, micro-batch
    last = ranks * chunks - 1

    def needed(each: Pass, rank: int) -> set[tuple[bool, int, int]]:
        stage = each.chunk * ranks + rank
        if each.is_forward:
            return {(True, stage - 1, each.micro_batch)} if stage else set()
        after = {(False, stage + 1, each.micro_batch)} if stage < last else set()
        return after | {(True, stage, each.micro_batch)}

    while any(left):
        ready = [
            rank for rank in range(ranks) if left[rank] and needed(left[rank][0], rank) <= done
        ]
        assert ready, left
        for rank in ready:
            each = left[rank].pop(0)
            done.add((each.is_forward, each.chunk * ranks + rank, each.micro_batch))


@pytest.mark.parametrize(("ranks", "count", "chunks"), SIZES)
def test_a_rank_holds_no_more_micro_batches_than_stages_follow(ranks, count, chunks):
    """With chunks: each has one of a group of `ranks`, and two more for each rank behind."""
    for rank in range(ranks):
        in_flight = most = 0
        for each in passes(rank, ranks, count, chunks):
            in_flight += 1 if each.is_forward else -1
            most = max(most, in_flight)
        behind = ranks - rank - 1
        held = behind if chunks == 1 else 2 * behind + (chunks - 1) * ranks
        assert most == min(held + 1, count * chunks)


def test_the_share_of_waiting():
    assert waiting_share(2, 1) == 0.5 and waiting_share(1, 4) == 0.0
    assert waiting_share(4, 8, 2) == pytest.approx(3 / 19)


P, R, C, T = 2, 3, 2, 2
AXES_OF_GRID = ParallelConfig(
    pipeline_model_parallel_size=P, context_parallel_size=C, tensor_model_parallel_size=T
)


def number(p: int, replica: int, c: int, t: int) -> int:
    """The number of the rank at these places."""
    return ((p * R + replica) * C + c) * T + t


def test_a_rank_knows_its_places_and_who_shares_its_work():
    config, nodes = SimpleNamespace(parallel=AXES_OF_GRID), Nodes(num_ranks=24, ranks_per_node=4)
    for p, replica, c, t in product(range(P), range(R), range(C), range(T)):
        ranks = PlannedRanks(config=config, nodes=nodes, rank=number(p, replica, c, t))
        assert (ranks.pipeline_rank, ranks.data_parallel_rank) == (p, replica)
        assert (ranks.context_rank, ranks.tensor_rank) == (c, t)
        assert (ranks.num_ranks, ranks.data_parallel_size) == (P * R * C * T, R)
        assert ranks.pipeline == tuple(number(each, replica, c, t) for each in range(P))
        assert ranks.tensor_group.members == tuple(number(p, replica, c, i) for i in range(T))
        assert ranks.context_group.members == tuple(number(p, replica, i, t) for i in range(C))
        assert ranks.tensor_group.index == t and ranks.context_group.index == c
