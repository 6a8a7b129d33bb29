"""Training on examples: the loss falls, and it is the same on any number of ranks."""

from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist

from tests.megatron_zpp.data.instructions.test_examples import write
from tests.megatron_zpp.train.training_runs import log_of, loss_values, losses, on_1, on_4
from tests.ranks import ranks

BATCH = "--micro-batch-size 2 --global-batch-size 8 --hidden-dropout 0 --attention-dropout 0 "
RELATIVE = 1e-5  # the promise for unquantized fp32 runs, whatever the stage and the ranks


@pytest.fixture(scope="module")
def sums(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Prompts are random numbers, the answer is the first of them again."""
    random = np.random.default_rng(0)
    drawn = [random.integers(1, 49, random.integers(1, 6)) for _ in range(200)]
    lines = [
        {"prompt": " ".join(map(str, numbers)), "answer": str(numbers[0])} for numbers in drawn
    ]
    return write(tmp_path_factory.mktemp("examples") / "sums.jsonl", *lines)


def test_ranks_and_stages_see_the_same_examples(sums: str, tmp_path: Path) -> None:
    flags = f"{BATCH} --data-path {sums} --split 80,20 --train-iters 4 --eval-iters 1 "
    on_1(flags=flags, path=tmp_path / "1")
    on_4(flags=flags + "--zero-stage 3 --num-workers 1", path=tmp_path / "4")
    alone, together = ((tmp_path / name).read_text() for name in "14")
    assert len(loss_values(alone)) == 4 and loss_values(alone)[-1] < loss_values(alone)[0]
    assert loss_values(together) == pytest.approx(loss_values(alone), rel=RELATIVE)
    assert alone.count("keep them apart") == together.count("keep them apart") == 1
    assert "validation loss at the end of training" in alone


@ranks(2, timeout=120)
def test_a_stop_in_the_middle_changes_no_digit(sums: str, tmp_path: Path) -> None:
    flags = f"{BATCH} --data-path {sums} --split 80,20 --train-iters 4 --zero-stage 2 "
    straight = log_of(flags)
    first = losses(log_of(f"{flags} --save {tmp_path} --exit-interval 2"))
    second = losses(log_of(f"{flags} --load {tmp_path}"))
    if dist.get_rank() == 0:
        assert len(second) == 2 and first + second == losses(straight)
