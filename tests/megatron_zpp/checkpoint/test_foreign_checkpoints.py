"""--load with another program's checkpoint: it says whose it is, and never advises to remove it."""

from pathlib import Path

import pytest

from megatron_zpp.checkpoint import checkpoint
from megatron_zpp.checkpoint.checkpoint_weights import find_checkpoint
from megatron_zpp.checkpoint.iteration_folders import IMPORTED_KINDS
from megatron_zpp.interchange.open_model import open_model
from tests.megatron_zpp.small_net import save_on_four
from tests.megatron_zpp.train.training_runs import log_of
from tests.ranks import ranks
from tests.zeropp.checkpoint.test_checkpoint_formats import FORMATS, write_checkpoint
from zeropp.checkpoint.checkpoint_formats import find_format
from zeropp.errors import InputError

# Rows of FORMATS without their names.
MEGATRON, TORCHTITAN = FORMATS[4][1:], FORMATS[10][1:]


@pytest.mark.parametrize(("name", "place", "inside", "beside"), FORMATS)
def test_it_says_whose_checkpoint_it_is_and_what_to_do(name, place, inside, beside, tmp_path):
    path = write_checkpoint(tmp_path, place, inside, beside)
    before = sorted(tmp_path.rglob("*"))
    for look in (checkpoint.choose, find_checkpoint):
        with pytest.raises(InputError) as caught:
            look(tmp_path)
        message = str(caught.value)
        assert f"--load {tmp_path}: {path} is {name}" in message
        source = "--from-checkpoint" if find_format(path)[1].kind in IMPORTED_KINDS else "--from-hf"
        assert f"tools/convert_hf.py {source}" in message
        assert not {"damaged", "remove", "afresh"} & set(message.replace(",", "").split())
    assert sorted(tmp_path.rglob("*")) == before


@ranks(2)
def load_foreign(folder: Path) -> None:
    with pytest.raises(InputError, match="a checkpoint of torchtitan"):
        checkpoint.choose(folder)


def test_all_ranks_are_told(tmp_path):
    write_checkpoint(tmp_path, *TORCHTITAN)
    load_foreign(folder=tmp_path)


@ranks(1, timeout=120)
def run_from(folder: Path, flags: str) -> None:
    with pytest.raises(InputError, match="a checkpoint of torchtitan"):
        log_of(f"--train-iters 1 --mock-data --micro-batch-size 1 --load {folder} {flags}")


@pytest.mark.parametrize("flags", ["", "--use-checkpoint-args ", "--finetune "])
def test_a_run_does_not_start_afresh_beside_it(flags, tmp_path):
    write_checkpoint(tmp_path, *TORCHTITAN)
    run_from(folder=tmp_path, flags=flags)


def test_a_damaged_checkpoint_of_ours_stays_a_damaged_one(tmp_path):
    save_on_four(folder=tmp_path, stage=2, iterations=(1, 2), keep=None)
    for iteration in (1, 2):
        (tmp_path / f"iter_000000{iteration}/manifest.json").unlink()
    with pytest.raises(InputError, match="manifest.json is missing") as caught:
        checkpoint.choose(tmp_path)
    assert "start afresh in another folder" in str(caught.value)
    assert "remove" not in str(caught.value)


def test_ours_are_loaded_beside_those_of_another_program(tmp_path):
    save_on_four(folder=tmp_path, stage=2, iterations=(20,), keep=None)
    pointer = (tmp_path / "latest_checkpointed_iteration.txt").read_text()
    write_checkpoint(tmp_path, *MEGATRON)  # iteration 10
    (tmp_path / "latest_checkpointed_iteration.txt").write_text(pointer)
    assert checkpoint.choose(tmp_path).name == "iter_0000020"
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("10")
    with pytest.raises(InputError, match="in its legacy format"):
        checkpoint.choose(tmp_path)
    assert checkpoint.choose(tmp_path, iteration=20).name == "iter_0000020"


@pytest.mark.parametrize(("name", "place", "inside", "beside"), FORMATS[:-1])
def test_what_opens_models_says_whose_it_is(name, place, inside, beside, tmp_path):
    path = write_checkpoint(tmp_path, place, inside, beside)
    for place in (tmp_path, path):
        with pytest.raises(InputError) as caught:
            open_model(place)
        assert f"{path} is {name}" in str(caught.value)
