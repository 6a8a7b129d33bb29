"""Rows sent to the ranks of their experts, and back, forward and backward."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.ranks import ranks
from zeropp.capabilities.experts.exchange import combine, dispatch
from zeropp.wire.rank_group import AXES, Nodes, RankGroup
from zeropp.wire.traffic import Traffic

SIZE, EXPERTS, WIDTH = 4, 8, 5
OWN = EXPERTS // SIZE


def expert_axis(rank: int, group: dist.ProcessGroup | None) -> RankGroup:
    """All ranks, two to a node."""
    return RankGroup(
        members=tuple(range(SIZE)), position=rank, nodes=Nodes(num_ranks=SIZE, ranks_per_node=2),
        purpose="expert", ledger=Traffic(AXES), group=group,
    )  # fmt: skip


def counts_of(case: str) -> Tensor:
    """How many rows each rank has for each expert, [SIZE, EXPERTS]."""
    counts = torch.zeros(SIZE, EXPERTS, dtype=torch.int64)
    if case == "one expert":
        counts[:, 5] = torch.arange(SIZE)
    elif case == "one rank":
        counts[2] = 3
    elif case != "nothing":
        generator = torch.Generator().manual_seed(int(case))
        counts = torch.randint(0, 4, (SIZE, EXPERTS), generator=generator)
    return counts


def rows_of(counts: Tensor) -> list[Tensor]:
    """Rows that say which rank, which expert, and which of its rows they are."""
    return [
        torch.tensor(
            [[rank, expert, index, 0, 1] for expert, n in enumerate(own) for index in range(n)],
            dtype=torch.float32,
        ).view(-1, WIDTH)
        for rank, own in enumerate(counts.tolist())
    ]


@pytest.mark.parametrize("case", ["nothing", "one expert", "one rank", *map(str, range(20))])
@ranks(SIZE)
def test_rows_go_to_their_experts_and_back(case: str) -> None:
    rank, counts = dist.get_rank(), counts_of(case)
    axis, rows = expert_axis(rank, dist.group.WORLD), rows_of(counts)
    own = rows[rank].requires_grad_()
    dispatched = dispatch(own, counts[rank], axis)
    assert torch.equal(dispatched.counts, counts.sum(0)[OWN * rank :][:OWN])
    arrived = torch.cat(rows)
    for expert, part in enumerate(dispatched.rows.split(dispatched.counts.tolist())):
        assert torch.equal(part, arrived[arrived[:, 1] == OWN * rank + expert])
    scale = torch.arange(1.0, OWN + 1).repeat_interleave(dispatched.counts)[:, None]
    back = combine(dispatched.rows * scale, dispatched, axis)
    factor = own.detach()[:, 1:2] % OWN + 1
    assert torch.equal(back, own.detach() * factor)
    (back * (rank + 1)).sum().backward()
    assert torch.equal(own.grad, (factor * (rank + 1)).expand_as(own))


@ranks(SIZE)
def test_the_ledger_counts_the_rows_that_leave_a_rank() -> None:
    rank, counts = dist.get_rank(), counts_of("3")
    axis = expert_axis(rank, dist.group.WORLD)
    own = rows_of(counts)[rank].requires_grad_()
    dispatched = dispatch(own, counts[rank], axis)
    combine(dispatched.rows, dispatched, axis).sum().backward()
    by_rank = counts.view(SIZE, SIZE, OWN).sum(2)  # rows from each rank to each
    for hop, others in (
        ("in_node", [rank ^ 1]),
        ("across_nodes", [(rank + 2) % 4, (rank + 2) % 4 ^ 1]),
    ):
        there = sum(int(by_rank[rank, other]) for other in others)
        back = sum(int(by_rank[other, rank]) for other in others)
        numbers = 8 * OWN * len(others)  # how many rows each expert gets, int64
        assert axis.ledger.sent["expert", hop] == 8 * WIDTH * (there + back) + numbers
