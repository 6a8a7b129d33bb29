"""Indexed datasets and examples: workers, ranks and stops change no sample; --skip-samples."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist

from megatron_zpp.data.indexed_dataset import write_dataset
from megatron_zpp.data.loader import Loader
from megatron_zpp.settings.config import BatchConfig, DataConfig
from megatron_zpp.settings.scheduled_values import GlobalBatchSize
from tests.megatron_zpp.data.instructions.test_examples import write
from tests.megatron_zpp.data.test_loader import Numbered
from tests.megatron_zpp.train.training_runs import (
    RELATIVE,
    log_of,
    loss_values,
    losses,
    require_same_digits_after_a_stop,
    run,
)
from tests.ranks import ranks
from zeropp.errors import InputError

VOCAB, EOD = 50, 49  # of the NullTokenizer in these runs; it takes the last id for the end
BATCH = "--micro-batch-size 2 --global-batch-size 8 --hidden-dropout 0 --attention-dropout 0 "
BY_DOCUMENT = "--reset-attention-mask --reset-position-ids --eod-mask-loss "


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two datasets of documents of 1 to 40 tokens, each token following from the one before."""
    folder = tmp_path_factory.mktemp("corpus")
    random = np.random.default_rng(0)
    for name, step in (("a", 1), ("b", 3)):
        documents = []
        for length in random.integers(1, 41, 300):
            start = random.integers(EOD)
            tokens = (start + step * np.arange(length)) % EOD
            documents.append([np.append(tokens, EOD)])
        write_dataset(folder / name, VOCAB, documents)
    return folder


def blend(corpus: Path) -> str:
    return f"--data-path 0.3 {corpus}/a 0.7 {corpus}/b --split 80,10,10 "


@pytest.fixture(scope="module")
def sums(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Prompts are random numbers, the answer is the first of them again."""
    random = np.random.default_rng(0)
    drawn = [random.integers(1, 49, random.integers(1, 6)) for _ in range(200)]
    lines = [
        {"prompt": " ".join(map(str, numbers)), "answer": str(numbers[0])} for numbers in drawn
    ]
    return write(tmp_path_factory.mktemp("examples") / "sums.jsonl", *lines)


@pytest.mark.parametrize("kind", ["", BY_DOCUMENT, "examples"])
def test_ranks_and_stages_see_the_same_samples(kind, corpus, sums, tmp_path):
    data = f"{kind} {blend(corpus)}"
    if kind == "examples":
        data = f"--data-path {sums} --split 80,20 "
    flags = f"{BATCH} {data} --train-iters 4 --eval-iters 1 "
    alone = run(1, flags, tmp_path)
    together = run(4, flags + "--zero-stage 3 --num-workers 1", tmp_path)
    assert len(loss_values(alone)) == 4 and loss_values(alone)[-1] < loss_values(alone)[0]
    assert loss_values(together) == pytest.approx(loss_values(alone), rel=RELATIVE)
    for log in (alone, together):
        assert log.count("keep them apart") == (kind == "examples")
        assert "validation loss at the end of training" in log


@pytest.mark.parametrize("order", ["single", "cyclic", "examples"])
def test_a_stop_in_the_middle_changes_no_digit(order, corpus, sums, tmp_path):
    data = f"{BY_DOCUMENT} {blend(corpus)} --dataloader-type {order} --num-workers 2 "
    if order == "examples":
        data = f"--data-path {sums} --split 80,20 "
    flags = f"{BATCH} {data} --train-iters 4 --zero-stage 2 --eval-iters 1 --eval-interval 3 "
    require_same_digits_after_a_stop(2, flags, tmp_path, rest="--num-workers 1")


@ranks(2, timeout=120)
def test_machines_with_other_data_are_told(corpus: Path) -> None:
    name = "ab"[dist.get_rank()]
    with pytest.raises(InputError, match="train data is .* hash .* on rank 0 and .* hash"):
        log_of(f"{BATCH} --data-path {corpus}/{name} --split 1,0,0 --train-iters 1")


def test_separating_documents_changes_the_loss(corpus: Path, tmp_path: Path) -> None:
    flags = f"{BATCH} {blend(corpus)} --train-iters 1 "
    first_losses = [
        loss_values(run(1, f"{flags} {mode}", tmp_path))[0]
        for mode in ("", "--reset-attention-mask", "--eod-mask-loss")
    ]
    assert len(set(first_losses)) == 3 and all(
        abs(loss - first_losses[0]) < 0.1 for loss in first_losses
    )


@ranks(1, timeout=120)
def test_the_time_of_the_loader_is_a_scalar(corpus: Path, tmp_path: Path) -> None:
    board = tmp_path / "board"
    flags = f"{BATCH} {blend(corpus)} --train-iters 2 --num-workers 1 --tensorboard-dir {board} "
    log_of(flags + "--log-timers-to-tensorboard")
    lines = (board / "metrics.jsonl").read_text().splitlines()
    for record in map(json.loads, lines[:2]):
        assert 0 < record["batch-generator-time"] < record["forward-backward-time"]


FLAGS = "--train-iters 6 --micro-batch-size 1 --global-batch-size 4 --lr-decay-style constant "


@pytest.mark.parametrize("kind", ["single", "cyclic"])
def test_the_loader_passes_over_whole_ranges(kind: str) -> None:
    def sample_numbers(consumed: int, *skipped: range) -> list[int]:
        data = DataConfig(num_workers=0, dataloader_type=kind)
        place = {"micro_batch_size": 1, "rank": 0, "world": 2, "eod": 9}
        with Loader(
            Numbered(20), data, consumed_samples=consumed, skipped=skipped, **place
        ) as batches:
            numbers = []
            while batches.consumed_samples < 20:
                numbers += [batches.consumed_samples, int(next(batches).tokens[0, 0]) // 10]
        return numbers

    everything = sample_numbers(0)
    assert sample_numbers(0, range(4, 8), range(8, 10)) == everything[:4] + everything[10:]
    assert sample_numbers(6, range(4, 8)) == everything[8:]
    assert sample_numbers(0, range(12, 20)) == everything[:12]


def test_a_batch_is_left_out_if_any_of_its_samples_is() -> None:
    ramped = GlobalBatchSize(
        BatchConfig(micro_batch_size=1, global_batch_size=8, rampup_batch_size=(4, 4, 8))
    )
    assert [ramped(consumed) for consumed in (0, 4, 8)] == [4, 4, 8]
    assert ramped.batches_with((range(5, 9), range(31, 32)), 0) == (
        range(4, 8), range(8, 16), range(24, 32),
    )  # fmt: skip
    assert ramped.batches_with((range(5, 9),), 16) == ()
    assert ramped.batches_with((), 0) == ()


@ranks(2)
def test_iterations_before_and_the_weights_after_a_gap_are_those_of_the_run(tmp_path) -> None:
    whole = log_of(FLAGS)
    gap = log_of(FLAGS + f"--skip-samples 9:10 --save {tmp_path}/a --save-interval 2")
    if dist.get_rank() == 0:  # the others print nothing
        assert losses(gap)[:2] == losses(whole)[:2] and len(losses(gap)) == len(losses(whole)) - 1
        assert re.findall(r"iteration (\d+) is left out: samples (\S+) ", gap) == [("3", "8:12")]
        assert re.findall(r"iteration +(\d+)/", gap) == ["1", "2", "4", "5", "6"]


@ranks(2)
def test_a_resumed_run_leaves_the_batch_out_that_a_whole_one_does(tmp_path) -> None:
    at_once = log_of(FLAGS + "--skip-samples 8:12 15:16")
    log_of(FLAGS + f"--save {tmp_path} --exit-interval 2")
    rest = log_of(FLAGS + f"--load {tmp_path} --skip-samples 8:12 15:16")
    if dist.get_rank() == 0:
        assert losses(rest) == losses(at_once)[2:] and len(losses(at_once)) == 4
