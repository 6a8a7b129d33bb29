"""Training on indexed datasets: workers, ranks and resuming change no sample and no loss."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist

from megatron_zpp.data.indexed_dataset import write_dataset
from tests.megatron_zpp.train.training_runs import log_of, loss_values, losses, on_1, on_4
from tests.ranks import ranks
from zeropp.errors import InputError

VOCAB, EOD = 50, 49  # of the NullTokenizer in these runs; it takes the last id for the end
BATCH = "--micro-batch-size 2 --global-batch-size 8 --hidden-dropout 0 --attention-dropout 0 "
BY_DOCUMENT = "--reset-attention-mask --reset-position-ids --eod-mask-loss "
RELATIVE = 1e-5  # the promise for unquantized fp32 runs, whatever the stage and the ranks


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


@pytest.mark.parametrize("by_document", ["", BY_DOCUMENT])
def test_ranks_and_stages_see_the_same_documents(
    corpus: Path, by_document: str, tmp_path: Path
) -> None:
    flags = f"{BATCH} {by_document} {blend(corpus)} --train-iters 4 "
    on_1(flags=flags, path=tmp_path / "1")
    on_4(flags=flags + "--zero-stage 3 --num-workers 1", path=tmp_path / "4")
    alone, together = ((tmp_path / name).read_text() for name in "14")
    assert len(loss_values(alone)) == 4 and loss_values(alone)[-1] < loss_values(alone)[0]
    assert loss_values(together) == pytest.approx(loss_values(alone), rel=RELATIVE)


@ranks(2, timeout=120)
def test_machines_with_other_data_are_told(corpus: Path) -> None:
    name = "ab"[dist.get_rank()]
    with pytest.raises(InputError, match="train data is .* hash .* on rank 0 and .* hash"):
        log_of(f"{BATCH} --data-path {corpus}/{name} --split 1,0,0 --train-iters 1")


def test_separating_documents_changes_the_loss(corpus: Path, tmp_path: Path) -> None:
    flags = f"{BATCH} {blend(corpus)} --train-iters 1 "
    for name, mode in enumerate(("", "--reset-attention-mask", "--eod-mask-loss")):
        on_1(flags=f"{flags} {mode}", path=tmp_path / str(name))
    first_losses = [loss_values((tmp_path / str(name)).read_text())[0] for name in range(3)]
    assert len(set(first_losses)) == 3 and all(
        abs(loss - first_losses[0]) < 0.1 for loss in first_losses
    )


@pytest.mark.parametrize("order", ["single", "cyclic"])
@ranks(2, timeout=120)
def test_a_stop_in_the_middle_changes_no_digit(corpus: Path, order: str, tmp_path: Path) -> None:
    flags = f"{BATCH} {BY_DOCUMENT} {blend(corpus)} --train-iters 4 --zero-stage 2 "
    flags += f"--dataloader-type {order} --eval-iters 1 --eval-interval 3 "
    straight = log_of(flags)
    first = log_of(f"{flags} --save {tmp_path} --num-workers 2 --exit-interval 2")
    second = log_of(f"{flags} --load {tmp_path} --num-workers 1")
    if dist.get_rank() == 0:
        assert len(losses(straight)) == 4 and len(losses(first)) == 2
        assert losses(first) + losses(second) == losses(straight)


@ranks(1, timeout=120)
def test_the_time_of_the_loader_is_a_scalar(corpus: Path, tmp_path: Path) -> None:
    board = tmp_path / "board"
    flags = f"{BATCH} {blend(corpus)} --train-iters 2 --num-workers 1 --tensorboard-dir {board} "
    log_of(flags + "--log-timers-to-tensorboard")
    lines = (board / "metrics.jsonl").read_text().splitlines()
    for record in map(json.loads, lines[:2]):
        assert 0 < record["batch-generator-time"] < record["forward-backward-time"]
