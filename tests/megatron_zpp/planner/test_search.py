"""Plans agree with the forecast and the estimate, and rank what they cannot tell apart as ties."""

import io
from dataclasses import dataclass, replace

import pytest
from rich.console import Console

from megatron_zpp.planner.advice import advice, what_would_fit, why_not
from megatron_zpp.planner.candidates import (
    LARGEST_MICRO_BATCH,
    all_settings,
    candidates_of,
    given_candidate,
)
from megatron_zpp.planner.estimate import ACTIVATIONS, MOMENTS, WEIGHTS, estimate
from megatron_zpp.planner.plan_table import print_plan
from megatron_zpp.planner.search import ROOM, TIE, Plan, Search, rank_rows
from megatron_zpp.planner.timing.hardware import GIB, Description, find_cluster
from megatron_zpp.planner.timing.step_time import typical_seconds
from megatron_zpp.settings.arguments import parse
from megatron_zpp.settings.scheduled_values import Schedules
from zeropp.sharding.forecast import node_bytes
from zeropp.wire.rank_group import Nodes

FLAGS = (
    "--num-layers 4 --hidden-size 256 --num-attention-heads 4 --seq-length 128 --bf16 "
    "--tokenizer-type NullTokenizer --vocab-size 511 --global-batch-size 64 --zero-stage 3 "
    "--hidden-dropout 0 --attention-dropout 0"
)
FEW_MICRO_BATCHES = "--global-batch-size 16"  # few sizes of them, and thus few rows
VOCABULARY = 512


def search(link="25gbit", flags="", **described):
    described = {"cluster": "dgx-a100", "num_nodes": 2, "link": link, **described}
    cluster = find_cluster(Description(**described))
    return Search(parse(f"{FLAGS} {flags}".split(), cluster.num_ranks), VOCABULARY, cluster)


@pytest.fixture(scope="module")
def slow_plan():
    return search("1gbit", FEW_MICRO_BATCHES).run()


def test_memory_and_bytes_are_those_of_the_estimate_and_the_forecast(slow_plan):
    nodes = Nodes.of(range(16), 8)
    for row in (*slow_plan.rows[::17], slow_plan.row_of_flags):
        expected = estimate(row.candidate.config, VOCABULARY, nodes, is_cpu=False)
        assert dict(row.memory) == dict(expected.device)
        sent = expected.sent
        if not row.candidate.is_divided:
            sent = node_bytes(expected.plan, expected.run.num_micro_batches, typical=True)
        far = sum(num_bytes for (_, hop), num_bytes in sent.items() if hop == "across_nodes")
        assert row.sent_in_m["across_nodes"] == far / row.num_parameters / 2
    assert {row.candidate.sizes[0] for row in slow_plan.rows} == {1, 2, 4}
    assert {row.candidate.sizes[1:] for row in slow_plan.rows} >= {(1, 1, 1), (2, 1, 2), (4, 1, 1)}


def test_state_memory_is_that_of_the_formula():
    """docs/memory.md: 4 and 8 bytes of a weight, over all ranks at stages 1 to 3."""
    searched = search()
    rows = {}
    for settings in all_settings(2, 8):
        rows[settings.name] = searched.row(next(candidates_of(searched.base, settings, 16)))
    parameters = rows["stage 0"].num_parameters
    assert rows["stage 0"].memory[WEIGHTS] == 4 * parameters
    for stage in (1, 2, 3):
        row = rows[f"stage {stage}"]
        assert row.memory[WEIGHTS] == 4 * parameters / 16
        assert row.memory[MOMENTS] == 8 * parameters / 16


def test_every_candidate_keeps_the_global_batch_and_is_a_valid_run():
    searched = search()
    count = 0
    for settings in all_settings(2, 8):
        for candidate in candidates_of(searched.base, settings, 16):
            config, zero = candidate.config, candidate.config.zero
            assert Schedules.of(config).batch_size.final == 64
            assert config.batch.micro_batch_size in (1, 2, 4) and 4 <= LARGEST_MICRO_BATCH
            micro_batches = 64 // 16 // candidate.micro_batch
            assert zero.gradient_accumulation_steps == micro_batches
            assert zero.stage == settings.zero["stage"]
            count += 1
    assert count == 3 * 3 * len(all_settings(2, 8))


@dataclass
class FakeSettings:
    inexactness: int
    name: str = ""


@dataclass
class FakeCandidate:
    settings: FakeSettings
    sizes: tuple[int, ...] = (1, 1, 1, 1)


@dataclass
class FakeRow:
    candidate: FakeCandidate
    seconds: float
    has_room: bool = True


def fake(seconds, inexactness, *sizes, has_room=True):
    candidate = FakeCandidate(FakeSettings(inexactness), sizes)
    return FakeRow(candidate, seconds, has_room)


def plan_of(rows):
    ordered, places = rank_rows(rows)
    return Plan(
        cluster=None, config=None, vocab_size=0, rows=tuple(ordered), places=tuple(places),
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


def test_of_equally_exact_ones_the_best_has_the_smallest_sizes():
    rows = [fake(1.0, 0, 8, 4), fake(1.01, 0, 2, 1), fake(1.02, 0, 1, 1), fake(1.0, 1, 1, 1)]
    assert plan_of(rows).best is rows[2]


def test_what_leaves_no_memory_does_not_share_the_place_of_others():
    rows = [
        fake(1.0, 0, has_room=False),
        fake(1.01, 1),
        fake(1.02, 2),
        fake(1.05, 0, has_room=False),
    ]
    plan = plan_of(rows)
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
    row = searched.row(given_candidate(searched.base))
    assert row.largest_kind == ACTIVATIONS and row.time is None
    assert why_not(row).endswith(f"{row.memory[ACTIVATIONS] / GIB:.1f} of them {ACTIVATIONS}")
    text = what_would_fit(searched, plan)
    assert "fits nowhere on 16 GPUs" in text
    needed = min(row.memory_bytes for row in plan.rows) + searched.cluster.reserved_bytes
    assert f"GPUs of {needed / GIB:.0f} GiB" in text


def test_a_link_rate_changes_the_time_and_nothing_else():
    searched = search("1gbit")
    candidate = given_candidate(searched.base)
    row, cluster = searched.row(candidate), searched.cluster
    times = [typical_seconds(row.work, cluster.with_link(rate)) for rate in (1, 10, 100, 1000)]
    assert times == sorted(times, reverse=True) and times[0] > 5 * times[-1]
    assert times[0] == row.seconds
