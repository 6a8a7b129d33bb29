"""A plan offers local steps where a node holds a replica, and advises them on slow links alone."""

from types import SimpleNamespace

import pytest

from megatron_zpp.planner.advice import about_alone, advice
from megatron_zpp.planner.replicas import compared_intervals, loss_change
from megatron_zpp.planner.search import LONGEST, MUCH_FASTER, ClusterPlan, Search
from megatron_zpp.planner.timing.hardware import GIB
from tests.megatron_zpp.planner.searches import search_for

# As wide as a model of 7 billion parameters, so that a step computes longer than messages start.
FLAGS = (
    "--num-layers 1 --hidden-size 4096 --num-attention-heads 32 --seq-length 2048 "
    "--vocab-size 32000 --global-batch-size 32 --zero-stage 3 "
)
VOCABULARY = 32001


def search(flags: str = "", **described: object) -> Search:
    return search_for(FLAGS + flags, VOCABULARY, **{"link": "25gbit", **described})


@pytest.fixture(scope="module")
def slow() -> ClusterPlan:
    return search(link="20mbit").run()


@pytest.fixture(scope="module")
def fast() -> ClusterPlan:
    return search().run()


def test_on_the_slowest_links_local_steps_are_advised(slow: ClusterPlan) -> None:
    assert [row.candidate.interval for row in slow.alone] == [10, 30, 100]
    advised, best = slow.advised, slow.best
    assert advised.candidate.interval == 100 and best.candidate.interval == 1
    assert best.time.typical > MUCH_FASTER * advised.time.typical
    text = advice(slow)
    assert text.startswith("Use local SGD, exchanged every 100 steps")
    change = loss_change("adam", 100)
    assert f"by published and measured losses {change}" in text and "must not change" in text
    assert change.source.split("\n")[0] in about_alone(slow)


def test_on_usual_links_they_are_listed_and_not_advised(fast: ClusterPlan) -> None:
    assert len(fast.alone) == 3 and fast.advised is fast.best
    assert "local SGD" not in advice(fast)
    alone = search("--global-batch-size 8", num_nodes=1).run()
    assert alone.alone == () and alone.advised is alone.best
    assert all(row.time.typical < fast.best.time.typical for row in fast.alone)


def test_bytes_and_waits_fall_with_the_interval(slow: ClusterPlan) -> None:
    first, *others = slow.alone
    for row in others:
        share = first.candidate.interval / row.candidate.interval
        assert row.memory == first.memory
        assert row.sent_in_m["across_nodes"] == pytest.approx(
            share * first.sent_in_m["across_nodes"]
        )
        assert row.time.across_nodes == pytest.approx(share * first.time.across_nodes)
        assert row.time.computing == first.time.computing
    # docs/local_sgd.md: .516 M (N-1)/N / H, with scales and padding.
    assert first.sent_in_m["across_nodes"] == pytest.approx(0.516 / 2 / 10, rel=0.01)


def test_a_replica_that_no_node_holds_is_not_offered_and_the_reason_is_said(
    fast: ClusterPlan,
) -> None:
    smallest = min(row.memory_bytes for row in fast.rows)
    reserved = fast.cluster.reserved_bytes
    plan = search(gpu_memory=(1.1 * smallest + reserved) / GIB).run()
    (row,) = plan.alone
    assert plan.fitting and row.time is None and plan.advised is plan.best
    text = about_alone(plan)
    assert "a node must hold a whole replica" in text
    assert f"needs {row.memory_bytes / GIB:.1f} of" in text and "local SGD" not in advice(plan)


def row_of(interval: int, seconds: float) -> SimpleNamespace:
    settings = SimpleNamespace(inexactness=0)
    candidate = SimpleNamespace(settings=settings, sizes=(1,), interval=interval)
    return SimpleNamespace(candidate=candidate, seconds=seconds, fits=True)


@pytest.mark.parametrize(
    ("together", "alone", "advised"),
    [
        (MUCH_FASTER * 1.01, (9.0, 1.0, 1.0), 30),  # the shortest that is about as fast
        (MUCH_FASTER * 1.01, (9.0, 1.01 * LONGEST, 1.0), 100),
        (MUCH_FASTER * 1.01, (9.0, 1.02, 1.0), 100),  # the other is not as much faster
        (MUCH_FASTER, (9.0, 1.0, 1.0), 1),
        (9 * MUCH_FASTER, (1.2, 1.1, 1.0), 10),
    ],
)
def test_the_shortest_interval_is_advised_that_is_about_as_fast(
    together: float, alone: tuple[float, ...], advised: int
) -> None:
    rows = [row_of(*each) for each in zip((10, 30, 100), alone, strict=True)]
    plan = ClusterPlan(
        cluster=None, space=None, rows=(row_of(1, together),), places=(1,),
        row_of_flags=None, alone=tuple(rows),
    )  # fmt: skip
    assert plan.advised.candidate.interval == advised


def test_what_the_flags_ask_for_is_among_the_intervals(tmp_path) -> None:
    path = tmp_path / "steps.json"
    path.write_text('{"zeropp": {"sync_every": 50, "sync_fragments": 4, "sync_delay": 12}}')
    given = search(f"--deepspeed_config {path}", link="20mbit")
    plan = given.run()
    # 10 steps are no more than the delay.
    assert [row.candidate.interval for row in plan.alone] == [30, 50, 100]
    assert all(row.candidate.interval == 1 for row in plan.rows)
    as_given = search(f"--deepspeed_config {path}", link="20mbit").run(only_flags=True)
    assert as_given.rows[0].time == plan.alone[1].time


@pytest.mark.parametrize("optimizer", ["adam", "muon"])
def test_losses_are_ranges_that_grow_with_the_interval(optimizer: str) -> None:
    known = [loss_change(optimizer, each) for each in compared_intervals()]
    assert all(each.lowest <= each.highest and each.source for each in known)
    assert [each.highest for each in known] == sorted(each.highest for each in known)
    assert loss_change(optimizer, 20) == loss_change(optimizer, 30)
    assert loss_change(optimizer, 10**6) is None
