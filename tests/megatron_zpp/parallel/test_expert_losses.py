"""Ranks that share a mixture of experts compute the losses, norms and biases of one rank."""

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megatron_zpp.checkpoint.checkpoint_weights import CheckpointWeights
from tests.megatron_zpp.parallel.flags import (
    CP2,
    GATHERED,
    NO_DROPOUT,
    PP2,
    SP,
    TP2,
    TWO_STAGES,
)
from tests.megatron_zpp.train.training_runs import field, run

RELATIVE = 1e-5
MODEL = (
    NO_DROPOUT + "--micro-batch-size 1 --global-batch-size 4 --train-iters 3 --lr 1e-2 --swiglu "
    "--normalization RMSNorm --position-embedding-type rope --disable-bias-linear "
    "--untie-embeddings-and-output-weights --init-method-std 0.3 --log-params-norm "
    "--num-experts 8 --moe-ffn-hidden-size 24 --moe-z-loss-coeff 0.1 "
)
SOFTMAX = MODEL + (
    "--moe-shared-expert-intermediate-size 16 --moe-shared-expert-gate "
    "--moe-router-load-balancing-type aux_loss seq_aux_loss --moe-aux-loss-coeff 0.1 0.2 "
)
SIGMOID = MODEL + (
    "--moe-router-score-function sigmoid --moe-router-enable-expert-bias "
    "--moe-router-bias-update-rate 0.03 --moe-router-num-groups 4 --moe-router-group-topk 2 "
    "--moe-router-topk 3 --moe-router-topk-scaling-factor 2.5 --moe-router-dtype fp32 "
    "--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.3 "
)
LOSSES = ("lm loss", "grad norm", "params norm", "z_loss", "seq_load_balancing_loss")
EP1, AGAIN = "--expert-model-parallel-size 1 ", "--recompute-granularity full "
DEEP = "--num-layers 4 --global-batch-size 8 "
ONE_STAGE = "--moe-layer-freq [1,0] "  # with experts, of two


def require_same_numbers(log: str, expected: str, names: tuple[str, ...]) -> None:
    for name in names:
        numbers, others = (list(map(float, field(each, name))) for each in (log, expected))
        assert len(numbers) == len(others) > 0, name
        digit = 1.01e-3 if name.endswith("norm") else 0  # the last one that is printed
        assert numbers == pytest.approx(others, rel=RELATIVE, abs=digit), name


@pytest.mark.parametrize(
    ("how", "model"),
    [
        ("--zero-stage 3 " + EP1, ""),
        (TP2 + EP1, ""),
        (TP2 + SP + EP1, ""),
        (TP2 + SP + "--zero-stage 1 " + AGAIN, ""),
        (CP2 + EP1, ""),
        (CP2 + GATHERED + AGAIN, ""),
        (PP2 + EP1, ONE_STAGE),
        (PP2 + TWO_STAGES + AGAIN, DEEP),
    ],
)
def test_losses_and_norms_are_those_of_one_rank(
    how: str, model: str, alone: Callable, tmp_path: Path
) -> None:
    flags = SOFTMAX + model
    names = (*LOSSES, "load_balancing_loss")
    require_same_numbers(run(2, flags + how, tmp_path), alone(flags), names)


@pytest.mark.parametrize(
    ("ranks", "how"),
    [(2, "--zero-stage 2 "), (2, TP2 + SP), (4, TP2 + SP + CP2 + AGAIN), (4, TP2 + SP + PP2)],
)
def test_biases_are_those_of_one_rank_to_the_bit(
    ranks: int, how: str, biases_alone: Callable, alone: Callable, tmp_path: Path
) -> None:
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
        AGAIN,
        AGAIN + "--recompute-method uniform --recompute-num-layers 2 ",
        "--recompute-granularity selective ",
        "--eval-iters 2 --eval-interval 1 ",
        "--moe-per-layer-logging ",
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
    flags = MODEL + "--moe-router-load-balancing-type global_aux_loss --moe-aux-loss-coeff 0.1 "
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
