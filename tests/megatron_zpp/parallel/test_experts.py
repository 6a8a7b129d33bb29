"""Ranks that share or split a mixture of experts compute the numbers of one rank."""

import functools
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megatron_zpp.checkpoint.checkpoint_weights import CheckpointWeights
from tests.megatron_zpp.parallel.flags import (
    CP2,
    EP1,
    EP2,
    EP4,
    GATHERED,
    NO_DROPOUT,
    PP2,
    SP,
    TP2,
    TWO_STAGES,
)
from tests.megatron_zpp.train.training_runs import (
    RELATIVE,
    field,
    require_same_digits_after_a_stop,
    run,
    with_json,
)

ROUTED = (
    "--num-layers 4 --micro-batch-size 1 --global-batch-size 4 --train-iters 3 --lr 1e-3 "
    "--disable-bias-linear --swiglu --init-method-std 0.2 --log-params-norm --num-experts 8 "
    "--moe-router-topk 3 --moe-ffn-hidden-size 16 --moe-z-loss-coeff 0.1 " + NO_DROPOUT
)
SOFTMAX = ROUTED + (
    "--moe-layer-freq 2 --moe-shared-expert-intermediate-size 24 --moe-shared-expert-gate "
    "--moe-router-load-balancing-type aux_loss seq_aux_loss --moe-aux-loss-coeff 0.3 0.2 "
)
SIGMOID = ROUTED + (
    "--num-layers 2 --normalization RMSNorm --position-embedding-type rope "
    "--untie-embeddings-and-output-weights --init-method-std 0.3 --lr 1e-2 "
    "--moe-router-score-function sigmoid --moe-router-enable-expert-bias "
    "--moe-router-bias-update-rate 0.03 --moe-router-num-groups 4 --moe-router-group-topk 2 "
    "--moe-router-topk-scaling-factor 2.5 --moe-router-dtype fp32 "
    "--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.3 "
)
LOSSES = ("lm loss", "grad norm", "params norm", "z_loss", "seq_load_balancing_loss")
AGAIN = "--recompute-granularity full "


def nodes_of(size: int, **zero: object) -> str:
    """The flag of a JSON with as many ranks per node."""
    return with_json({"stage": 3, **zero}, ranks_per_node=size)


# What ranks split, and how many of two, four or eight there are.
CHOSEN = [
    (2, "--zero-stage 3 " + EP1),
    (2, TP2 + EP1),
    (2, TP2 + SP + "--zero-stage 1 " + AGAIN),
    (2, CP2 + EP1),
    (2, CP2 + GATHERED + AGAIN),
    (2, PP2 + EP1),
    (2, PP2 + TWO_STAGES + AGAIN + "--global-batch-size 8 "),
    (4, EP2 + nodes_of(2)),
    (4, nodes_of(2, stage=1)),
    (4, EP4 + nodes_of(2, stage=2)),
    (4, EP4 + AGAIN + nodes_of(1)),
    (4, EP4 + TP2 + SP + nodes_of(2, stage=1)),
    (4, EP1 + TP2 + SP + nodes_of(2)),
    (4, EP2 + CP2 + nodes_of(1)),
    (4, EP4 + CP2 + GATHERED + nodes_of(2)),
    (4, EP2 + PP2 + nodes_of(1)),
    (4, PP2 + TP2 + SP + AGAIN + nodes_of(2)),
    # Each stage has two nodes of two ranks, over which it splits its experts.
    (8, EP4 + PP2 + TWO_STAGES + TP2 + SP + AGAIN + "--global-batch-size 8 " + nodes_of(2)),
]  # fmt: skip


def require_same_numbers(log: str, expected: str, names: tuple[str, ...]) -> None:
    for name in names:
        numbers, others = (
            [float(each.strip("%")) for each in field(text, name)] for text in (log, expected)
        )
        assert len(numbers) == len(others) > 0, name
        digit = 1.01e-3 if name.endswith("norm") else 0  # the last one that is printed
        assert numbers == pytest.approx(others, rel=RELATIVE, abs=digit), name


@pytest.mark.parametrize(("num_ranks", "how"), CHOSEN)
def test_the_numbers_are_those_of_one_rank(num_ranks, how, alone, tmp_path):
    """More ways to share the work are drawn in test_random_parallel.py."""
    (samples,) = re.findall(r"--global-batch-size \d+ ", how) or [""]
    log = run(num_ranks, SOFTMAX + how, tmp_path)
    names = (*LOSSES, "load_balancing_loss", "busiest expert")
    require_same_numbers(log, alone(SOFTMAX + samples), names)
    assert num_ranks < 8 or "tokens cross once to each node" in log


@pytest.mark.parametrize(
    ("ranks", "how"),
    [(2, "--zero-stage 2 "), (2, TP2 + SP), (4, TP2 + SP + CP2 + AGAIN), (4, TP2 + SP + PP2)],
)
def test_biases_are_those_of_one_rank_to_the_bit(ranks, how, biases_alone, alone, tmp_path):
    log = run(ranks, f"{SIGMOID}{how}--save {tmp_path}/saved ", tmp_path)
    require_same_numbers(log, alone(SIGMOID), LOSSES)
    found, expected = biases(tmp_path / "saved"), biases_alone()
    assert found.keys() == expected.keys() and len(found) == 2
    for name, bias in found.items():
        assert bias.dtype == torch.float32 and torch.equal(bias, expected[name])
        steps = bias / 0.03  # three of one each, up or down, or none at the mean
        torch.testing.assert_close(steps, steps.round(), rtol=0, atol=1e-5)
        assert 1 <= steps.abs().max() <= 3.001


@pytest.fixture(scope="session")
def biases_alone(tmp_path_factory: pytest.TempPathFactory) -> Callable:
    """The biases after a run on one rank, which trains once."""

    @functools.cache
    def trained() -> dict[str, torch.Tensor]:
        folder = tmp_path_factory.mktemp("biases")
        run(1, f"{SIGMOID}--save {folder}/saved ", folder)
        return biases(folder / "saved")

    return trained


def biases(folder: Path) -> dict[str, torch.Tensor]:
    """The biases of experts in a checkpoint, by name."""
    weights = CheckpointWeights(folder / "iter_0000003", lambda name: name.endswith("expert_bias"))
    return {name: weights.read(name) for name in weights.facts()}


@pytest.mark.parametrize(
    "how",
    [
        AGAIN + "--recompute-method uniform --recompute-num-layers 2 ",
        "--recompute-granularity selective ",
        "--eval-iters 2 --eval-interval 1 --moe-per-layer-logging ",
    ],
)
@pytest.mark.parametrize("model", [SOFTMAX, SIGMOID])
def test_what_changes_no_digit(how: str, model: str, alone: Callable, tmp_path: Path) -> None:
    """Nothing is decided or counted in a recomputation or in evaluation."""
    log, expected = run(1, model + how, tmp_path), alone(model)
    for name in (*LOSSES, "busiest expert"):
        assert field(log, name) == field(expected, name), name


def test_a_loss_per_token_of_full_samples_is_the_mean(alone: Callable, tmp_path: Path) -> None:
    """Losses of experts are multiplied by all tokens of a micro-batch, which all have a loss."""
    log = run(2, SOFTMAX + "--calculate-per-token-loss " + CP2, tmp_path)
    require_same_numbers(log, alone(SOFTMAX), (*LOSSES, "load_balancing_loss"))


def test_the_loss_of_a_global_batch_counts_all_ranks(alone: Callable, tmp_path: Path) -> None:
    """In the first step it is that of one rank with all samples; its gradient is averaged."""
    flags = ROUTED + "--moe-router-load-balancing-type global_aux_loss --moe-aux-loss-coeff 0.1 "
    two = flags + "--global-batch-size 2 "
    found, expected = run(2, two, tmp_path), alone(two + "--micro-batch-size 2 ")
    numbers = [float(field(log, "global_load_balancing_loss")[0]) for log in (found, expected)]
    assert numbers[0] == pytest.approx(numbers[1], rel=RELATIVE)
    shared = run(2, two + TP2 + SP, tmp_path)
    require_same_numbers(shared, alone(two), ("lm loss", "grad norm", "global_load_balancing_loss"))


def test_the_log_shows_how_experts_are_used(alone: Callable, tmp_path: Path) -> None:
    log = alone(SIGMOID)
    for share in field(log, "busiest expert"):
        assert 1 / 8 <= float(share.rstrip("%")) / 100 <= 1 / 3 + 1e-3  # of three for each token
    assert field(log, "busiest rank") == ["1.000"] * 3
    split = run(2, SIGMOID + "--zero-stage 3 --expert-model-parallel-size 2 ", tmp_path)
    loads = list(map(float, field(split, "busiest rank")))
    assert all(1 <= load <= 2 for load in loads) and max(loads) > 1


def test_a_run_goes_on_where_other_ranks_have_the_experts(alone: Callable, tmp_path: Path) -> None:
    """It stops after each iteration but the last two."""
    flags, log = f"{SOFTMAX} --train-iters 6 {nodes_of(2)} --load {tmp_path}/saved ", ""
    for how in (EP2 + TP2 + SP, EP4, EP1, EP2 + PP2):
        log += run(4, f"{flags}{how} --save {tmp_path}/saved --exit-interval 1", tmp_path)
    log += run(4, flags + EP2, tmp_path)
    require_same_numbers(log, alone(f"{SOFTMAX} --train-iters 6 "), ("lm loss", "grad norm"))


@pytest.mark.parametrize("how", [EP4, EP2 + PP2, EP2 + TP2 + SP])
def test_with_zeropp_a_stop_changes_no_digit(how: str, tmp_path: Path) -> None:
    all_of_it = {"zero_quantized_weights": True, "zero_quantized_gradients": True}
    nodes = nodes_of(2, **all_of_it, zero_hpz_partition_size=2)
    flags = f"{SOFTMAX} --bf16 --lr 1e-2 --moe-dispatch-bits 8 {how} {nodes}"
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
