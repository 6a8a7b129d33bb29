"""Checkpoints: equal to the last bit at other numbers of ranks and stages; others are refused.

Damage, full disks and failing ranks are named, and what was complete stays usable.
"""

import logging
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron_zpp.checkpoint import checkpoint
from megatron_zpp.checkpoint.iteration_folders import (
    POINTER,
    Retention,
    candidates,
    checkpoint_name,
)
from megatron_zpp.checkpoint.training_state import read_state
from tests.full_disk import full_disk
from tests.megatron_zpp.small_net import (
    ARCHITECTURE,
    build,
    contents,
    equal,
    load_here,
    load_on_two,
    names,
    save_in,
    save_on_four,
    state_at,
    train,
)
from tests.megatron_zpp.train.training_runs import shared_folder
from tests.ranks import ranks
from zeropp.checkpoint.async_save import AsyncWriter
from zeropp.errors import InputError


@ranks(4)
def load_on_four(folder: Path, stage: int, iteration: int) -> None:
    load_here(folder, stage, iteration)


@pytest.fixture(scope="module")
def saved_at(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Folders of checkpoints that four ranks saved, by stage: all before two ranks load any.

    Other ranks form another process group, in which DTensor works out all shardings anew.
    """
    folders = [tmp_path_factory.mktemp(f"stage-{stage}") for stage in range(4)]
    for stage, folder in enumerate(folders):
        save_on_four(folder=folder, stage=stage, iterations=(2,), keep=None)
        load_on_four(folder=folder, stage=(stage + 1) % 4, iteration=2)
    return folders


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_loads_at_other_ranks_and_stages(stage: int, saved_at: list[Path]) -> None:
    load_on_two(folder=saved_at[stage], stage=3 - stage, iteration=2)
    load_here(saved_at[stage], 0, 2)  # without a process group


@ranks(2)
def test_machines_may_know_the_folder_by_other_paths(saved_at: list[Path], tmp_path: Path) -> None:
    path = saved_at[0]
    if torch.distributed.get_rank() == 1:
        path = tmp_path / "mounted here"
        path.symlink_to(saved_at[0])
    assert checkpoint.choose(path, verify=False) == path / "iter_0000002"
    if torch.distributed.get_rank() == 1:
        path = tmp_path / "of this machine alone"
    with pytest.raises(InputError, match=r"rank 0 on .* sees iter_0000002; .* by rank 1 on "):
        checkpoint.choose(path)


@ranks(4)
def save_both_ways(folder: Path, stage: int) -> None:
    model, optimizer = build(stage, seed=1)
    with AsyncWriter() as writer:
        for iteration in (1, 2, 3):
            train(model, optimizer, 1)
            for name, option in (("now", None), ("beside", writer)):
                state = state_at(iteration)
                save_in(
                    folder / name, model, optimizer, state, keep=Retention(newest=2), writer=option
                )
        writer.finish()


@pytest.mark.parametrize("stage", [0, 3])
def test_asynchronous_saves_are_the_same_to_the_last_byte(stage: int, tmp_path: Path) -> None:
    save_both_ways(folder=tmp_path, stage=stage)
    now, beside = (
        {path.relative_to(root): path.read_bytes() for path in root.rglob("*") if path.is_file()}
        for root in (tmp_path / "now", tmp_path / "beside")
    )
    assert names(tmp_path / "now") == names(tmp_path / "beside")
    assert len(now) == 1 + 2 * (4 + 3) and now == beside


@ranks(2)
def test_training_goes_on_bit_by_bit(tmp_path: Path) -> None:
    """Four steps in one go, and two, saved, loaded elsewhere, two more, are the same."""
    folder = shared_folder(str(tmp_path))
    model, optimizer = build(3, seed=1)
    train(model, optimizer, 2)
    save_in(folder, model, optimizer, state_at(2))
    train(model, optimizer, 2)
    again, optimizer_again = build(3, seed=5)
    checkpoint.load(folder, again, optimizer_again)
    train(again, optimizer_again, 2)
    assert equal(contents(model, optimizer), contents(again, optimizer_again))


def test_state_survives_as_it_was_and_settings_are_not_state(tmp_path: Path) -> None:
    model, optimizer = build(0, seed=1)
    for folder in (tmp_path / "nowhere", tmp_path):
        assert checkpoint.load(folder, model, optimizer) is None
    save_in(tmp_path / "new", model, optimizer, state_at(0))  # before the first update
    train(model, optimizer, 1)
    written = state_at(1, loss_scaler={"words": [2**63, 1]}, schedule={"lr": 1e-5 / 3})
    path = save_in(tmp_path, model, optimizer, written)
    optimizer.param_groups[0].update(lr=0.5, weight_decay=0.25)
    assert checkpoint.load(tmp_path, model, optimizer) == written == read_state(path)
    group = optimizer.param_groups[0]
    assert (group["lr"], group["weight_decay"]) == (0.5, 0.25)
    assert (tmp_path / POINTER).read_text() == "1\n" and path == tmp_path / "iter_0000001"
    wrapped, fresh = build(0, seed=2)
    wrapped.blocks[0] = torch.compile(wrapped.blocks[0], backend="eager")  # leaves no trace
    checkpoint.load(tmp_path, wrapped, None)
    assert torch.equal(wrapped.blocks[0].up.weight, model.blocks[0].up.weight)
    assert checkpoint.load(tmp_path / "new", wrapped, fresh).iteration == 0 and not fresh.state


def test_optimizer_can_be_left_out(tmp_path: Path) -> None:
    model, optimizer = build(0, seed=1)
    train(model, optimizer, 1)
    save_in(tmp_path, model, optimizer, state_at(1), save_optimizer=False)
    other, fresh = build(0, seed=2)
    with pytest.raises(InputError, match="--no-load-optim"):
        checkpoint.load(tmp_path, other, fresh)
    checkpoint.load(tmp_path, other, fresh, load_optimizer=False)
    assert not fresh.state
    assert torch.equal(other.head.weight, model.head.weight)


def test_pruning_spares_what_is_not_ours_or_newer(tmp_path: Path) -> None:
    model, optimizer = build(0, seed=1)
    (tmp_path / "iter_0000001").mkdir()
    for iteration in (2, 3, 9, 4):  # of which the newest one is kept
        save_in(tmp_path, model, optimizer, state_at(iteration), keep=Retention(newest=1))
    assert names(tmp_path) == ["iter_0000001", "iter_0000004", "iter_0000009"]
    assert checkpoint.load(tmp_path, model, optimizer).iteration == 4  # the one pointed to


def test_pruning_spares_those_of_an_interval(tmp_path: Path) -> None:
    model, optimizer = build(0, seed=1)
    keep = Retention(interval=4)
    for iteration in (2, 4, 6, 8, 10):
        save_in(tmp_path, model, optimizer, state_at(iteration), keep=keep)
    assert names(tmp_path) == ["iter_0000004", "iter_0000008", "iter_0000010"]
    keep = Retention(interval=4, newest=2)
    for iteration in (11, 12, 13):
        save_in(tmp_path, model, optimizer, state_at(iteration), keep=keep)
    later = ["iter_0000012", "iter_0000013"]
    assert names(tmp_path) == ["iter_0000004", "iter_0000008", *later]


@pytest.fixture(scope="module")
def two_checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two")
    save_on_four(folder=folder, stage=2, iterations=(1, 2), keep=None)
    return folder


@ranks(2)
def test_another_architecture_is_refused_with_each_difference(two_checkpoints: Path) -> None:
    model, optimizer = build(3, seed=2, size=8, num_layers=3)
    before = contents(model, optimizer)
    shape = {"hidden_size": 8, "num_layers": 3}
    with pytest.raises(InputError) as error:
        checkpoint.load(two_checkpoints, model, optimizer, architecture=shape)
    text = str(error.value)
    for words in (
        "hidden_size is 7 in the checkpoint, 8 in the model",
        "num_layers is 2 in the checkpoint, 3 in the model",
        "embedding.weight has shape [7, 7] in the checkpoint, [8, 8] in the model",
        "blocks.1.up.weight has shape [5, 7] in the checkpoint, [5, 8] in the model",
        "only in the model: blocks.2.norm.weight",
    ):
        assert words in text
    assert "blocks.0.up.bias" not in text  # equal
    assert equal(contents(model, optimizer), before)


def test_a_smaller_model_and_another_tokenizer_are_refused(two_checkpoints: Path) -> None:
    names_of_one = r"only in the checkpoint: blocks\.1\.norm\.w.*down\.bias\n"
    with pytest.raises(InputError, match=names_of_one):
        checkpoint.load(two_checkpoints, build(0, seed=2, num_layers=1)[0], None)
    with pytest.raises(InputError, match="another tokenizer"):
        checkpoint.load(two_checkpoints, build(0, seed=2)[0], None, tokenizer="xyz")


def test_equal_shapes_with_other_settings_are_refused_or_fine_tuned(two_checkpoints, caplog):
    model, _ = build(0, seed=2)
    other = ARCHITECTURE | {"rotary_base": 500, "window_size": "4,0"}
    differs = "rotary_base is 10000.0 in the checkpoint, 500 in the model"
    with pytest.raises(InputError, match=f"(?s){re.escape(differs)}.*, or --finetune, which"):
        checkpoint.load(two_checkpoints, model, None, architecture=other)
    with caplog.at_level(logging.INFO, "megatron_zpp"):
        checkpoint.load(two_checkpoints, model, None, architecture=other, fine_tunes=True)
    window = "window_size is None in the checkpoint, 4,0 in the model"
    assert caplog.messages == [f"--finetune: {differs}", f"--finetune: {window}"]
    for setting in ({"swiglu": True}, {"rotary_interleaved": True}):
        with pytest.raises(InputError, match=f"{[*setting][0]} is False(?s:(?!finetune).)*$"):
            checkpoint.load(
                two_checkpoints, model, None, architecture=other | setting, fine_tunes=True
            )


def test_settings_that_a_checkpoint_is_too_old_for_have_their_defaults(two_checkpoints):
    model, _ = build(0, seed=2)
    newer = ARCHITECTURE | {"window_size": None, "add_qkv_bias": False, "norm_placement": "pre"}
    checkpoint.load(two_checkpoints, model, None, architecture=newer)
    with pytest.raises(InputError, match="add_qkv_bias is False in the checkpoint, True in"):
        other = newer | {"add_qkv_bias": True}
        checkpoint.load(two_checkpoints, model, None, architecture=other)


def truncate(path: Path) -> None:
    shard = path / "__2_0.distcp"
    shard.write_bytes(shard.read_bytes()[:-9])


def flip(path: Path) -> None:
    shard = path / "__1_0.distcp"
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)


def lose_shard(path: Path) -> None:
    (path / "__3_0.distcp").unlink()


def lose_manifest(path: Path) -> None:
    (path / "manifest.json").unlink()


def halve_manifest(path: Path) -> None:
    (path / "manifest.json").write_text((path / "manifest.json").read_text()[:100])


DAMAGES = [
    (truncate, "__2_0.distcp has"),
    (flip, "the content of __1_0.distcp changed"),
    (lose_shard, "__3_0.distcp is missing"),
    (lose_manifest, "manifest.json is missing"),
    (halve_manifest, "manifest.json is not readable"),
    (shutil.rmtree, "iter_0000002 does not exist"),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGES)
def test_damaged_newest_is_named_and_the_one_before_used(
    damage: Callable[[Path], None],
    message: str,
    two_checkpoints: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    folder = shutil.copytree(two_checkpoints, tmp_path / "copy")
    damage(folder / "iter_0000002")
    with caplog.at_level(logging.WARNING, "megatron_zpp"):
        load_here(folder, 0, 1)
    assert message in caplog.text
    assert str(folder / "iter_0000002") in caplog.text
    load_on_two(folder=folder, stage=3, iteration=1)


def test_without_verifying_only_the_sizes_are_compared(two_checkpoints, tmp_path):
    folder = shutil.copytree(two_checkpoints, tmp_path / "copy")
    flip(folder / "iter_0000002")
    assert checkpoint.choose(folder) == folder / "iter_0000001"
    assert checkpoint.choose(folder, verify=False) == folder / "iter_0000002"
    truncate(folder / "iter_0000002")
    assert checkpoint.choose(folder, verify=False) == folder / "iter_0000001"


@pytest.mark.parametrize(("text", "iteration"), [("", 2), ("soon", 2), (None, 2), ("1\n", 1)])
def test_the_newest_is_used_unless_the_pointer_names_another(
    text: str | None, iteration: int, two_checkpoints: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(two_checkpoints, tmp_path / "copy")
    pointer = folder / POINTER
    pointer.unlink() if text is None else pointer.write_text(text)
    assert checkpoint.choose(folder).name == f"iter_000000{iteration}"


@pytest.mark.parametrize(("latest", "order"), [(12, [12, 8, 4, 16]), (6, [6, 4, 8, 12, 16])])
def test_older_checkpoints_are_tried_newest_first(latest: int, order: list, tmp_path: Path) -> None:
    """Newer ones than the pointer's come last; the pointer's comes first, even if it is gone."""
    for iteration in (4, 8, 12, 16):
        (tmp_path / checkpoint_name(iteration)).mkdir()
    (tmp_path / POINTER).write_text(str(latest))
    assert candidates(tmp_path)[0] == [tmp_path / checkpoint_name(each) for each in order]


@ranks(2)
def test_what_fails_on_one_rank_fails_on_all(two_checkpoints: Path, tmp_path: Path) -> None:
    """A damaged checkpoint, a folder that is a file, a full disk, and a mistake of ours."""
    model, optimizer = build(3, seed=1)
    is_second, shared = dist.get_rank() == 1, shared_folder(str(tmp_path))
    damaged, folder = shared / "copy", shared / "save"
    if is_second:
        shutil.copytree(two_checkpoints, damaged)
        flip(damaged / "iter_0000001")
        lose_shard(damaged / "iter_0000002")
        (shared / "file").write_text("in the way")
    dist.barrier()
    with pytest.raises(InputError) as error:
        checkpoint.load(damaged, model, optimizer)
    assert "iter_0000001: the content of __1_0.distcp changed" in str(error.value)
    assert "iter_0000002: __3_0.distcp is missing" in str(error.value)
    with pytest.raises(InputError, match="cannot save in .*file"):
        save_in(shared / "file" / "save", model, optimizer, state_at(1))
    train(model, optimizer, 1)
    save_in(folder, model, optimizer, state_at(1))
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    dist.barrier()
    with full_disk(4000) if is_second else nullcontext(), pytest.raises(InputError) as error:
        save_in(folder, model, optimizer, state_at(2))
    assert f"cannot save in {folder} (rank 1): File too large" in str(error.value)
    assert "needs" in str(error.value) and "are free" in str(error.value)
    dist.barrier()
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    save_in(folder, model, optimizer, state_at(2))  # and the ranks still work together
    assert checkpoint.choose(folder).name == "iter_0000002"
    if is_second:
        model.state_dict = None
    with pytest.raises((TypeError, RuntimeError), match="'NoneType' object is not callable"):
        save_in(folder, model, optimizer, state_at(1))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB, where this user may mount one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("this user may not mount a small file system")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@ranks(2)
def fill_the_disk(folder: Path) -> None:
    large = nn.Linear(300, 300)  # 360 kB: the space is checked before writing
    with pytest.raises(InputError) as error:
        save_in(folder / "large", large, None, state_at(1))
    assert "too little space left" in str(error.value) and "361,200 bytes" in str(error.value)
    assert names(folder / "large") == []
    model, optimizer = build(3, seed=1)
    with pytest.raises(InputError, match="cannot save.*: No space left on device. The checkpoint"):
        for iteration in range(1, 100):
            train(model, optimizer, 1)
            save_in(folder, model, optimizer, state_at(iteration))
    assert iteration > 1
    assert checkpoint.load(folder, model, optimizer).iteration == iteration - 1
    assert names(folder) == [f"iter_{number:07d}" for number in range(1, iteration)]


def test_disk_that_is_too_small_or_fills_up_while_writing(small_disk: Path) -> None:
    fill_the_disk(folder=small_disk)
