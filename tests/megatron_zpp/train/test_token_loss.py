"""--calculate-per-token-loss: the mean over a step's tokens, however the step is divided."""

from pathlib import Path

import numpy as np
import pytest

from megatron_zpp.data.indexed_dataset import write_dataset
from megatron_zpp.train.inputs import TRAIN
from tests.megatron_zpp.train.training_runs import (
    RELATIVE,
    built_run,
    field,
    held_out,
    log_of,
    loss_values,
    run,
)
from tests.ranks import ranks

VOCAB, EOD = 50, 49  # of the NullTokenizer; it takes the last id for the end


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Documents of 1 to 40 tokens, of which every fifth is only ends of document.

    With --eod-mask-loss, samples of 16 lose none to all of their tokens.
    """
    prefix = tmp_path_factory.mktemp("data") / "text"
    random = np.random.default_rng(0)
    documents = []
    for number, length in enumerate(random.integers(1, 41, 300)):
        start = random.integers(EOD)
        text = np.append((start + np.arange(length)) % EOD, EOD)
        documents.append([np.full(50, EOD) if number % 5 == 0 else text])
    write_dataset(prefix, VOCAB, documents)
    return (
        f"--data-path {prefix} --split 80,20,0 --eod-mask-loss --hidden-dropout 0 "
        "--attention-dropout 0 --global-batch-size 8 --train-iters 3 --eval-iters 1 "
        "--eval-at-start "
    )


@pytest.fixture(scope="module")
def whole(data: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The log of one rank that computes each step in one micro-batch."""
    return run(1, data + "--micro-batch-size 8", tmp_path_factory.mktemp("whole"))


def evaluated(log: str) -> list[float]:
    return list(map(float, held_out(log)))


def require_same_numbers(log: str, expected: str) -> None:
    assert loss_values(log) == pytest.approx(loss_values(expected), rel=RELATIVE)
    assert evaluated(log) == pytest.approx(evaluated(expected), rel=RELATIVE)
    norms, expected_norms = (
        [float(norm) for norm in field(each, "grad norm")] for each in (log, expected)
    )
    assert norms == pytest.approx(expected_norms, abs=1e-3)  # printed with three digits


@pytest.mark.parametrize(
    ("num_ranks", "flags"),
    [
        (1, "--micro-batch-size 1"),
        (2, "--micro-batch-size 2 --zero-stage 2"),
        (4, "--micro-batch-size 1 --zero-stage 3"),
        (2, "--micro-batch-size 2 --pipeline-model-parallel-size 2"),
        (4, "--micro-batch-size 1 --context-parallel-size 2"),
        (4, "--micro-batch-size 1 --tensor-model-parallel-size 2"),
    ],
)
def test_it_is_the_loss_of_the_step_in_one_micro_batch(num_ranks, flags, data, whole, tmp_path):
    """A single micro-batch has one mean over its tokens, with the flag and without it."""
    divided = run(num_ranks, f"{data} {flags} --calculate-per-token-loss", tmp_path)
    require_same_numbers(divided, whole)
    assert len(held_out(whole)) >= 1


def empty_shares(log: str) -> list[str]:
    return [(field(line, "empty micro-batches") or [""])[0] for line in log.splitlines()
            if "lm loss: " in line]  # fmt: skip


@ranks(1, timeout=120)
def count_empty(flags: str, expected: list[str]) -> None:
    """Require the shares of samples that have no token with a loss to be the `expected` ones."""
    with built_run(flags) as run, run.batches.loader(TRAIN, 0) as batches:
        empty = [not next(batches).loss_mask.sum() for _ in range(24)]
    shares = [sum(empty[first : first + 8]) / 8 for first in (0, 8, 16)]
    assert [f"{share:.2%}" if share else "" for share in shares] == expected


def test_without_it_a_micro_batch_counts_whatever_it_has(data, whole, tmp_path):
    """Those without any token count as 0, and their share is logged; an evaluation has no such."""
    flags = data + "--micro-batch-size 1 "
    divided = run(1, flags, tmp_path)
    differences = np.abs(np.subtract(loss_values(divided), loss_values(whole)))
    assert differences.min() > 10 * RELATIVE * max(loss_values(whole))
    count_empty(flags=flags, expected=empty_shares(divided))
    assert any(empty_shares(divided)) and not any(empty_shares(whole))
    split = data + "--micro-batch-size 1 --pipeline-model-parallel-size 2 --context-parallel-size 2"
    on_ranks = run(4, split, tmp_path)
    assert empty_shares(on_ranks) == empty_shares(divided)
    untrained = evaluated(whole)[0]
    assert evaluated(divided)[0] == pytest.approx(untrained, rel=RELATIVE)
    assert evaluated(on_ranks)[0] == pytest.approx(untrained, rel=RELATIVE)


@ranks(1, timeout=120)
def evaluate_masked(prefix: Path) -> None:
    log = log_of(
        f"--data-path {prefix} --split 50,50,0 --eod-mask-loss --eval-iters 1 --train-iters 1 "
        "--micro-batch-size 1 --global-batch-size 1 "
    )
    assert "no validation loss at " in log and not held_out(log)
    still = "--train-iters 2 --micro-batch-size 1 --global-batch-size 2 --lr 0 --min-lr 0 "
    still += "--eval-interval 1 --eval-iters "
    (first, second, *_), (both, *_) = (evaluated(log_of(still + count)) for count in "12")
    assert first != second and both == pytest.approx((first + second) / 2, rel=RELATIVE)


def test_an_evaluation_without_any_token_reports_no_loss_and_others_go_on(tmp_path):
    prefix = tmp_path / "ends"
    write_dataset(prefix, VOCAB, [[np.full(50, EOD)]] * 10)
    evaluate_masked(prefix=prefix)
