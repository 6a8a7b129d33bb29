"""Plans of mixtures: which ranks split experts, and whether weights or tokens should cross."""

from dataclasses import replace
from functools import partial

import pytest

from megatron_zpp.capabilities.experts.messages import copies_across_nodes
from megatron_zpp.planner.advice import advice
from megatron_zpp.planner.candidates import Candidate
from megatron_zpp.planner.crossing import Crossing, crossing_of
from megatron_zpp.planner.run_forecast import RunForecast
from megatron_zpp.planner.search import ClusterPlan, Search
from megatron_zpp.planner.zero_settings import compared_settings
from tests.megatron_zpp.planner.searches import search_for
from zeropp.sharding.forecast import CHANGED_SHARE, CODED_SHARE

VOCABULARY = 512
FEW = 4  # samples of a step: few sizes of micro-batches, and thus few rows
ALL_THREE = "stage 3, qwZ hpZ qgZ, gradients once"
HIDDEN, EXPERTS, WIDTH, CHOSEN = 256, 16, 512, 4
FLAGS = (
    f"--num-layers 2 --hidden-size {HIDDEN} --num-attention-heads 4 --seq-length 128 --swiglu "
    f"--vocab-size 511 --disable-bias-linear --num-experts {EXPERTS} --moe-router-topk {CHOSEN} "
    f"--moe-ffn-hidden-size {WIDTH} --zero-stage 3 "
)
LORA = "--lora-rank 4 --pretrained-checkpoint none "


def search(batch: int, flags: str = "", link: str = "1gbit", num_nodes: int = 2) -> Search:
    text = f"{FLAGS} --global-batch-size {batch} {flags}"
    return search_for(text, VOCABULARY, gpus_per_node=2, num_nodes=num_nodes, link=link)


def break_even_tokens(
    *,
    expert_weights: int,
    bytes_per_weight: float,
    hidden_size: int,
    num_nodes: int,
    copies: float,
    bytes_per_channel: float = 8,
) -> float:
    """Return how many tokens of a node in a step take the bytes that their experts would.

    With fewer, experts split over m nodes send fewer bytes; with more, experts split in a node do.
    Both move a node's bytes per step away from 1 / m of the experts' weights, so that the number
    of nodes that have the same experts does not matter:

        T* = (1 - 1/m) · weights · bytes_per_weight / (bytes_per_channel · H · copies)

    expert_weights: of a layer. bytes_per_weight: sent for each in a step with experts in the node,
    2 (q + 0.258 g) in docs/moe.md. copies: of a token that cross in one move.
    bytes_per_channel: of the moves of a step together, 8 for four in 16 bit, 6 with INT8 towards
    experts, 12 with full recomputation.
    """
    saved = (1 - 1 / num_nodes) * expert_weights * bytes_per_weight
    return saved / (bytes_per_channel * hidden_size * copies)


def candidate_of(its_search: Search, name: str) -> Candidate:
    """The first configuration with the ZeRO settings of a name."""
    space = its_search.space
    compared = compared_settings(space.nodes, has_adapters=space.base.lora.lora_rank > 0)
    settings = next(each for each in compared if each.name == name)
    return next(space.candidates(settings, space.nodes.num_ranks))


def found_crossing(its_search: Search, candidate: Candidate) -> Crossing:
    crossing = crossing_of(candidate, its_search.space.nodes, its_search.model)
    assert crossing is not None
    return crossing


@pytest.mark.parametrize(
    ("name", "num_nodes", "q", "g"),
    [
        ("stage 3, hpZ, gradients once", 4, 1, 1),
        (ALL_THREE, 2, 0.504, 0.258),
        (
            "stage 3, qwZ hpZ qgZ, incremental updates, INT3, gradients once",
            2,
            0.504 * CHANGED_SHARE,
            0.203 * CODED_SHARE[3],
        ),
    ],
)
def test_the_threshold_is_that_of_the_formula(
    name: str, num_nodes: int, q: float, g: float
) -> None:
    """That of docs/moe.md: weights take q, gradients g, in units of 16 bit.

    With a token go 4 numbers of experts and 4 weights in fp32, of which the formula knows nothing.
    """
    its_search = search(32, num_nodes=num_nodes)
    crossing = found_crossing(its_search, candidate_of(its_search, name))
    expected = break_even_tokens(
        expert_weights=3 * EXPERTS * HIDDEN * WIDTH,
        bytes_per_weight=2 * (q + g),
        hidden_size=HIDDEN,
        num_nodes=num_nodes,
        copies=copies_across_nodes(EXPERTS, CHOSEN, num_nodes),
    )
    row = 4 * 2 * HIDDEN  # 4 moves in bf16
    assert crossing.threshold_tokens == pytest.approx(expected * row / (row + 2 * 16 + 4), rel=0.01)
    assert (crossing.in_node, crossing.across) == (2, 2 * num_nodes)
    assert crossing.tokens == 32 * 128 / num_nodes and crossing.first_copy == 0


def test_where_tokens_take_the_bytes_of_experts() -> None:
    """The table of a published model, Qwen3-30B-A3B: 128 experts of width 768, 8 for each token."""
    weights = 3 * 128 * 768 * 2048
    each = partial(
        break_even_tokens, expert_weights=weights, hidden_size=2048, num_nodes=2,
        bytes_per_weight=2 * (0.504 + 0.258),
    )  # fmt: skip
    assert each(copies=4) == pytest.approx(7000, rel=0.01)
    assert each(copies=copies_across_nodes(128, 8, 2)) == pytest.approx(28_000, rel=0.01)


@pytest.fixture(scope="module")
def plan() -> ClusterPlan:
    return search(FEW).run()


def test_all_sizes_are_compared_and_the_flags_stay_as_given(plan: ClusterPlan) -> None:
    undivided = [row for row in plan.rows if not row.candidate.is_divided]
    assert {row.candidate.expert_ranks for row in undivided} == {1, 2, 4}
    at_stage_0 = [row for row in undivided if row.candidate.config.zero.stage == 0]
    assert {row.candidate.expert_ranks for row in at_stage_0} == {1, 2, 4}
    for size in (1, 4):
        given = search(FEW, f"--expert-model-parallel-size {size}").run(only_flags=True)
        assert [row.candidate.expert_ranks for row in given.rows] == [size]


def test_memory_and_bytes_are_those_of_the_estimate(plan: ClusterPlan) -> None:
    nodes = search(FEW).space.nodes
    for row in plan.rows[::29]:
        expected = RunForecast.of(row.candidate.config, VOCABULARY, nodes, is_cpu=False)
        assert dict(row.memory) == dict(expected.device)
        far = sum(sent for (_, hop), sent in expected.sent.items() if hop == "across_nodes")
        assert row.sent_in_m["across_nodes"] == far / row.num_parameters / 2


def test_what_should_cross_is_said(plan: ClusterPlan) -> None:
    crossing = plan.crossing
    assert crossing.tokens < crossing.threshold_tokens
    said = f"tokens should cross (tokens below {crossing.threshold_tokens:,.0f})"
    assert said in advice(plan)


@pytest.mark.parametrize(("batch", "is_few"), [(16, True), (1024, False)])
def test_a_step_is_faster_as_fewer_bytes_cross(batch: int, is_few: bool) -> None:
    """Where links are slow: with tokens that cross if there are few."""
    its_search = search(batch, link="100mbit")
    given = candidate_of(its_search, ALL_THREE)
    crossing, seconds = found_crossing(its_search, given), []
    for size in (crossing.in_node, crossing.across):
        parallel = replace(given.config.parallel, expert_model_parallel_size=size)
        config = replace(given.config, parallel=parallel)
        seconds.append(its_search.row(replace(given, config=config)).seconds)
    assert (crossing.tokens < crossing.threshold_tokens) == is_few
    assert (seconds[1] < seconds[0]) == is_few


@pytest.mark.parametrize(
    ("name", "bytes_per_weight"), [("MixZ++, INT8", 1 + 4 / 256), ("stage 3, hpZ", 2)]
)
def test_frozen_experts_cross_once(name: str, bytes_per_weight: float, plan: ClusterPlan) -> None:
    """Each of two nodes sends half of them, as INT8 with an fp32 scale for 256, or in 16 bit."""
    its_search = search(FEW, LORA)
    crossing = found_crossing(its_search, candidate_of(its_search, name))
    assert crossing.weights == crossing.threshold_tokens == 0
    stored = 3 * EXPERTS * HIDDEN * WIDTH * bytes_per_weight
    assert stored < crossing.first_copy < 1.15 * stored  # and attention's
    said = advice(replace(plan, crossing=crossing))
    assert "nothing of the experts crosses nodes in a step: frozen weights do once in a run" in said


def test_adapters_have_times_and_the_best_sends_no_frozen_weights() -> None:
    its_plan = search(FEW, LORA).run()
    far = its_plan.best.sent_in_m["across_nodes"]
    assert its_plan.best.candidate.settings.name in ("stage 3, hpZ", "MixZ++, INT8")
    assert its_plan.best.candidate.expert_ranks < 4 and 0 < far < 0.02
