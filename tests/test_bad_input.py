"""Whatever a person gets wrong ends with a non-zero status and the culprit in the last lines.

What each part of the program refuses is tested with that part: flags in `tests/data/refusals.tsv`,
datasets in `tests/megatron_zpp/data`.
"""

import os
from pathlib import Path

import numpy as np
import pytest

from megatron_zpp.commands.pretrain import main
from megatron_zpp.data.indexed_dataset import write_dataset
from zeropp.checkpoint.folder_lock import FolderLock

TINY = (
    "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --train-iters 2 "
    "--micro-batch-size 1 --eval-iters 0 --num-workers 0 --log-interval 1 --lr 1e-3 "
)
NUMBERS = TINY + "--tokenizer-type NullTokenizer --vocab-size 20 "
MOCK = NUMBERS + "--mock-data "
LONG = MOCK + "--train-iters 100000 "


@pytest.fixture
def fails(capsys):
    """Run the job with flags that must fail; return its last lines."""

    def run(flags: str | list[str]) -> str:
        assert main(flags.split() if isinstance(flags, str) else flags) != 0
        captured = capsys.readouterr()
        assert "Traceback" not in captured.out + captured.err
        lines = captured.out.splitlines()
        error_line = max(i for i, line in enumerate(lines) if line.startswith("error:"))
        return "\n".join(lines[error_line:])

    return run


@pytest.fixture
def prefix(tmp_path) -> Path:
    """A dataset of 40 documents of 12 tokens below 20."""
    path = tmp_path / "text_document"
    write_dataset(path, 20, ([np.arange(12) % (document % 7 + 2)] for document in range(40)))
    return path


# Of flags, tokenizers, data, prompts before the first iteration, and losses: one of each.
MISTAKES = {
    f"{MOCK} --hiden-size 16": ["--hiden-size", "--hidden-size"],
    f"{TINY} --tokenizer-model nowhere.json": ["--tokenizer-type"],
    f"{NUMBERS} --split 0,1,0 --data-path PREFIX": ["no training data", "0,1,0"],
    f"{NUMBERS} --valid-data-path PREFIX": ["no training data", "train"],
    f"{NUMBERS} --data-path PREFIX --split 1,0,0 --train-iters 50 --vocab-size 5": [
        "vocabulary", "5",
    ],
    f"{LONG} --sample-prompt def": ["'def'"],
    f"{LONG} --sample-prompt PROMPT": ["the prompt has 5,000 tokens, but the model has"],
    f"{LONG} --lr 1e30 --clip-grad 0 --weight-decay 0": ["no update was made", "Lower --lr"],
    f"{MOCK} --fp16 --initial-loss-scale 1e30 --min-loss-scale 1e30 --hysteresis 1": [
        "smallest loss scale",
    ],
}  # fmt: skip


@pytest.mark.parametrize("flags", MISTAKES, ids=lambda flags: flags[len(TINY) :])
def test_the_culprit_is_in_the_last_lines(flags, fails, prefix):
    values = {"PREFIX": str(prefix), "PROMPT": "1 " * 5000}
    message = fails([values.get(word, word) for word in flags.split()])
    assert all(culprit in message for culprit in MISTAKES[flags]), message


def test_a_folder_for_checkpoints_that_cannot_be_written(tmp_path, capsys):
    """At the start, not when the first checkpoint is saved."""
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / "save"
    assert main(f"{MOCK} --save {folder}".split()) == 2
    printed = capsys.readouterr().out
    assert printed.splitlines()[-1] == (
        f"error: --save {folder} cannot be written (Not a directory): name a folder that can"
    )
    assert "iteration" not in printed and not list(tmp_path.iterdir())[1:]


def test_a_folder_for_checkpoints_that_another_job_saves_in(fails, tmp_path, capsys):
    lock = FolderLock.of(tmp_path)
    assert lock.take() is None
    message = fails(f"{MOCK} --save {tmp_path} --load {tmp_path}")
    assert f"another job saves there, process {os.getpid()} on " in message
    assert main(f"{MOCK} --load {tmp_path}".split()) == 0  # reading is allowed
    assert main(f"{MOCK} --save {tmp_path} --skip-train".split()) == 0  # it saves nothing
    assert lock.is_held()
    lock.release()
    assert main(f"{MOCK} --save {tmp_path}".split()) == 0
    assert not lock.path.exists()
    message = fails(f"{MOCK} --load {tmp_path} --hidden-size 32 --num-layers 2")
    assert "hidden_size" in message and "num_layers" in message
    message = fails(f"{MOCK} --load {tmp_path} --use-checkpoint-args --seq-length 16")
    assert "16" in message and "--max-position-embeddings 8" in message


def test_nothing_to_load(fails, tmp_path, capsys):
    assert main(f"{MOCK} --load {tmp_path}/typo".split()) == 0
    assert f"--load {tmp_path}/typo holds no checkpoint" in capsys.readouterr().out
    for flag in ("--finetune", "--exit-on-missing-checkpoint", "--use-checkpoint-args"):
        message = fails(f"{MOCK} --load {tmp_path}/typo {flag}")
        assert flag in message and "typo holds no checkpoint" in message
