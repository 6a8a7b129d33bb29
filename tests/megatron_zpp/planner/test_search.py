"""Plans agree with the forecast and the estimate, and rank what they cannot tell apart as ties."""

import io
from dataclasses import replace
from types import SimpleNamespace

import pytest
from rich.console import Console

from megatron_zpp.planner.advice import advice, what_would_fit, why_not
from megatron_zpp.planner.candidates import LARGEST_MICRO_BATCH
from megatron_zpp.planner.plan_table import print_plan
from megatron_zpp.planner.run_forecast import ACTIVATIONS, RunForecast
from megatron_zpp.planner.search import ROOM, TIE, ClusterPlan, rank_rows
from megatron_zpp.planner.timing.hardware import GIB
from megatron_zpp.planner.zero_settings import compared_settings
from tests.megatron_zpp.planner.searches import search_for
from zeropp.sharding.forecast import node_bytes
from zeropp.wire.rank_group import Nodes

FLAGS = (
    "--num-layers 4 --hidden-size 256 --num-attention-heads 4 --seq-length 128 --vocab-size 511 "
    "--global-batch-size 64 --zero-stage 3 "
)
FEW_MICRO_BATCHES = "--global-batch-size 16"  # few sizes of them, and thus few rows
VOCABULARY = 512
NODES = Nodes.of(range(16), 8)


def search(link="25gbit", flags="", **described):
    return search_for(FLAGS + flags, VOCABULARY, link=link, **described)


@pytest.fixture(scope="module")
def slow_plan():
    return search("1gbit", FEW_MICRO_BATCHES).run()


def test_memory_and_bytes_are_those_of_the_estimate_and_the_forecast(slow_plan):
    for row in (*slow_plan.rows[::17], slow_plan.row_of_flags):
        expected = RunForecast.of(row.candidate.config, VOCABULARY, NODES, is_cpu=False)
        assert dict(row.memory) == dict(expected.device)
        sent = expected.sent
        if not row.candidate.is_divided:
            sent = node_bytes(expected.first.plan, expected.first.num_micro_batches, typical=True)
        far = sum(num_bytes for (_, hop), num_bytes in sent.items() if hop == "across_nodes")
        assert row.sent_in_m["across_nodes"] == far / row.num_parameters / 2
    assert {row.candidate.sizes[0] for row in slow_plan.rows} == {1, 2, 4}
    assert {row.candidate.sizes[1:] for row in slow_plan.rows} >= {(1, 1, 1), (2, 1, 2), (4, 1, 1)}


def test_every_candidate_keeps_the_global_batch_and_is_a_valid_run():
    searched = search()
    count = 0
    for settings in compared_settings(NODES):
        for candidate in searched.space.candidates(settings, 16):
            config, zero = candidate.config, candidate.config.zero
            assert config.schedules.batch_size.final == 64
            assert config.batch.micro_batch_size in (1, 2, 4) and 4 <= LARGEST_MICRO_BATCH
            micro_batches = 64 // 16 // candidate.micro_batch
            assert zero.gradient_accumulation_steps == micro_batches
            assert zero.stage == settings.zero["stage"]
            count += 1
    assert count == 3 * 3 * len(compared_settings(NODES))


def fake(seconds, inexactness, *sizes, has_room=True):
    settings = SimpleNamespace(inexactness=inexactness, name="")
    candidate = SimpleNamespace(settings=settings, sizes=sizes or (1, 1, 1, 1))
    return SimpleNamespace(candidate=candidate, seconds=seconds, has_room=has_room)


def plan_of(rows):
    ordered, places = rank_rows(rows)
    return ClusterPlan(
        cluster=None, space=None, rows=tuple(ordered), places=tuple(places),
        row_of_flags=None,
    )  # fmt: skip


def test_ties_share_a_place_the_fastest_first_and_the_most_exact_is_the_best():
    inside, outside = 1 + 0.9 * TIE, 1 + 1.1 * TIE
    rows = [fake(outside, 0), fake(1.0, 3), fake(inside, 0), fake(1.01, 2), fake(9.0, 1)]
    plan = plan_of(rows)
    keys = [(row.candidate.settings.inexactness, row.seconds) for row in plan.rows]
    assert keys == [(3, 1.0), (2, 1.01), (0, inside), (0, outside), (1, 9.0)]
    assert plan.places == (1, 1, 1, 4, 5)
    assert plan.best is rows[2]
    exact = [fake(1.0, 0, 8, 4), fake(1.01, 0, 2, 1), fake(1.02, 0, 1, 1), fake(1.0, 1, 1, 1)]
    assert plan_of(exact).best is exact[2]  # that of the smallest sizes
    tight = [(1.0, 0, False), (1.01, 1, True), (1.02, 2, True), (1.05, 0, False)]
    rows = [fake(seconds, kind, has_room=has_room) for seconds, kind, has_room in tight]
    plan = plan_of(rows)  # what leaves no memory does not share the place of others
    assert [row.seconds for row in plan.rows] == [1.01, 1.02, 1.0, 1.05]
    assert plan.places == (1, 1, 3, 3) and plan.best is rows[1]
    assert plan_of(rows[:1]).best is rows[0]


def test_room_is_what_the_table_shows_of_the_memory_left(slow_plan):
    row, printed = slow_plan.row_of_flags, {}
    for left in (ROOM, ROOM - 1, -1):
        size = row.memory_bytes + left + row.cluster.reserved_bytes
        gpu = replace(row.cluster.gpu, memory_bytes=size)
        tight = replace(row, cluster=replace(row.cluster, gpu=gpu))
        assert (tight.fits, tight.has_room) == (left >= 0, left == ROOM)
        console = Console(file=io.StringIO())
        print_plan(replace(slow_plan, row_of_flags=tight), 1, console)
        printed[left] = console.file.getvalue()
    assert "The flags as given do not fit" in printed[-1]
    assert printed[ROOM] == printed[ROOM - 1] and "as given do not fit" not in printed[ROOM]
    assert (
        f"{(ROOM - GIB / 1000) / GIB:.1f}" == "0.0" and f"{(ROOM + GIB / 1000) / GIB:.1f}" == "0.1"
    )


def test_on_slow_links_quantizing_pays_and_on_fast_ones_it_does_not(slow_plan):
    best = slow_plan.best
    assert best.candidate.settings.inexactness > 0
    assert "times as fast as the best without quantization" in advice(slow_plan)
    assert "across nodes" in advice(slow_plan)
    fast = search("3200gbit", FEW_MICRO_BATCHES).run()
    assert fast.best.candidate.settings.inexactness == 0
    assert "Quantizing does not pay here" in advice(fast)
    times = [row.time.typical for row in slow_plan.fitting]
    assert times == sorted(times) and all(row.has_room for row in slow_plan.fitting)
    assert best.time.typical <= min(times) * (1 + TIE)


def test_what_the_flags_ask_for_is_among_the_rows_and_can_stand_alone(slow_plan):
    alone = search("1gbit", "--micro-batch-size 2").run(only_flags=True)
    assert len(alone.rows) == 1 and alone.rows[0].candidate.micro_batch == 2
    assert "Without --as-given others are compared" in advice(alone)
    assert slow_plan.row_of_flags.fits and any(
        row.memory == slow_plan.row_of_flags.memory and row.candidate.micro_batch == 1
        for row in slow_plan.rows
    )


def test_a_row_that_does_not_fit_names_the_largest_kind_and_what_would_fit():
    searched = search(gpu_memory=1.605)  # 5 MiB for tensors
    plan = searched.run()
    assert not plan.fitting and plan.rows
    row = searched.row(searched.space.given)
    assert row.largest_kind == ACTIVATIONS and row.time is None
    assert why_not(row).endswith(f"{row.memory[ACTIVATIONS] / GIB:.1f} of them {ACTIVATIONS}")
    text = what_would_fit(searched, plan)
    assert "fits nowhere on 16 GPUs" in text
    needed = min(row.memory_bytes for row in plan.rows) + searched.cluster.reserved_bytes
    assert f"GPUs of {needed / GIB:.0f} GiB" in text
