"""Training on ranks that split experts prints the numbers of one rank."""

import itertools
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.megatron_zpp.parallel.flags import CP2, GATHERED, PP2, SP, TP2, TWO_STAGES
from tests.megatron_zpp.train.training_runs import (
    field,
    require_equal,
    require_same_digits_after_a_stop,
    run,
    with_json,
)

SIZES = (
    "--num-layers 4 --hidden-dropout 0 --attention-dropout 0 --micro-batch-size 1 "
    "--global-batch-size 4 --train-iters 3 --lr 1e-3 --disable-bias-linear --swiglu "
    "--init-method-std 0.2 "  # so that routers have gradients that count
)
SOFTMAX = SIZES + (
    "--num-experts 8 --moe-router-topk 3 --moe-ffn-hidden-size 16 --moe-layer-freq 2 "
    "--moe-shared-expert-intermediate-size 24 --moe-shared-expert-gate --moe-z-loss-coeff 0.1 "
    "--moe-router-load-balancing-type aux_loss seq_aux_loss --moe-aux-loss-coeff 0.3 0.2 "
)
RECOMPUTED = "--recompute-granularity full "
EP1, EP2, EP4 = (f"--expert-model-parallel-size {size} " for size in (1, 2, 4))


def nodes_of(size: int, **zero: object) -> str:
    """The flag of a JSON with as many ranks per node."""
    return with_json({"stage": 3, **zero}, ranks_per_node=size)


CHOSEN = (
    (EP2, {}),
    ("", {"stage": 1}),
    (EP4, {"stage": 2}),
    (EP4 + RECOMPUTED, {"size": 1}),
    (EP4 + TP2 + SP, {"stage": 1}),
    (EP1 + TP2 + SP, {}),
    (TP2, {}),
    (EP2 + CP2, {"size": 1}),
    (EP4 + CP2 + GATHERED, {}),
    (EP2 + PP2, {"size": 1}),
    (PP2 + TP2 + SP + RECOMPUTED, {}),
)


def all_combinations() -> Iterator[tuple[str, dict]]:
    """Expert ranks, other axes, recomputation, micro-batches of a step, and stages."""
    offload = {"offload_optimizer": {"device": "cpu"}}
    for size, axes, recomputed, samples, zero in itertools.product(
        (EP1, EP2, EP4),
        ("", TP2 + SP, CP2, CP2 + GATHERED, PP2, PP2 + TP2 + SP),
        ("", RECOMPUTED, "--recompute-granularity selective "),
        ("--global-batch-size 4 ", "--global-batch-size 16 "),
        ({"stage": 1}, {"stage": 2}, {"stage": 3}, {"stage": 3, **offload}),
    ):
        if not (size == EP4 and PP2 in axes):  # a stage has two ranks
            yield size + axes + recomputed + samples, zero


COMBINATIONS = [*all_combinations()] if os.environ.get("ALL_EXPERT_RANKS") else CHOSEN


@pytest.mark.parametrize(("how", "zero"), COMBINATIONS)
def test_losses_and_norms_are_those_of_one_rank(
    how: str, zero: dict, alone: Callable[[str], str], tmp_path: Path
) -> None:
    """Set ALL_EXPERT_RANKS to run all combinations."""
    (samples,) = re.findall(r"--global-batch-size \d+ ", how) or [""]
    require_those_of_one_rank(4, how, alone(SOFTMAX + samples), tmp_path, **{"size": 2, **zero})


@pytest.mark.parametrize("how", [RECOMPUTED, TWO_STAGES, TP2 + SP])
def test_tokens_of_each_stage_of_a_pipeline_cross_nodes(
    how: str, alone: Callable[[str], str], tmp_path: Path
) -> None:
    """Each stage has two nodes of two ranks, over which it splits its experts."""
    samples = "--global-batch-size 8 "  # two micro-batches
    how, expected = EP4 + PP2 + how + samples, alone(SOFTMAX + samples)
    log = require_those_of_one_rank(8, how, expected, tmp_path, size=2)
    assert "tokens cross once to each node" in log


def require_those_of_one_rank(
    num_ranks: int, how: str, expected: str, folder: Path, **nodes: object
) -> str:
    log = run(num_ranks, SOFTMAX + how + nodes_of(**nodes), folder)
    require_equal(log, expected)
    for name in ("load_balancing_loss", "seq_load_balancing_loss", "z_loss", "busiest expert"):
        numbers, others = (
            [each.strip("%") for each in field(log, name)] for log in (log, expected)
        )
        assert [*map(float, numbers)] == pytest.approx([*map(float, others)], rel=1e-5) != [], name
    return log


ALL_OF_IT = {
    "zero_quantized_weights": True,
    "zero_hpz_partition_size": 2,
    "zero_quantized_gradients": True,
}


def test_a_run_goes_on_where_other_ranks_have_the_experts(
    alone: Callable[[str], str], tmp_path: Path
) -> None:
    """It stops after each iteration but the last two."""
    flags, log = f"{SOFTMAX} --train-iters 6 ", ""
    saved = f"{nodes_of(2)} --save {tmp_path}/saved --load {tmp_path}/saved "
    for how in (EP2 + TP2 + SP, EP4, EP1, EP2 + PP2):
        log += run(4, f"{flags}{how}{saved} --exit-interval 1", tmp_path)
    log += run(4, f"{flags}{EP2}{nodes_of(2)} --load {tmp_path}/saved", tmp_path)
    require_equal(log, alone(flags))


@pytest.mark.parametrize("how", [EP1, EP4, EP2 + PP2, EP2 + TP2 + SP])
def test_with_zeropp_a_stop_changes_no_digit(how: str, tmp_path: Path) -> None:
    flags = f"{SOFTMAX} --bf16 --lr 1e-2 --moe-dispatch-bits 8 {how} {nodes_of(2, **ALL_OF_IT)}"
    straight, second = require_same_digits_after_a_stop(4, flags, tmp_path)
    is_across = how == EP4
    assert ("--moe-dispatch-bits 8 has no effect here: no token crosses" in straight) != is_across
    assert ("tokens cross once to each node, towards experts as INT8" in straight) == is_across
    splits_all = how in (EP4, EP2 + PP2)  # the ranks that share a layer
    assert ("so that there is nothing to copy" in straight) == splits_all
    assert "whole codes cross the nodes once more" not in second


def test_the_held_out_loss_and_a_sample(tmp_path: Path) -> None:
    flags = f"{SOFTMAX} --eval-iters 1 --sample-prompt 1 --sample-length 5 "
    expected = run(1, flags, tmp_path)
    log = run(4, flags + EP4 + nodes_of(2), tmp_path)
    for name in ("validation loss at the end of training", "Sample"):
        assert name in log and name in expected
    assert log.split("Sample")[1] == expected.split("Sample")[1]
