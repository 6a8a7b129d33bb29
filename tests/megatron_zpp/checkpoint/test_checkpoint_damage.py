"""Damaged checkpoints, full disks, failing ranks: named, and what was complete stays usable."""

import logging
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch.distributed as dist
from torch import nn

from megatron_zpp.checkpoint import checkpoint
from megatron_zpp.checkpoint.iteration_folders import POINTER
from tests.full_disk import full_disk
from tests.megatron_zpp.small_net import (
    build,
    load_here,
    load_on_two,
    names,
    save_on_four,
    state_at,
    train,
)
from tests.ranks import ranks
from zeropp.errors import InputError


@pytest.fixture(scope="module")
def two_checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two")
    save_on_four(folder=folder, stage=2, iterations=(1, 2), keep=None)
    return folder


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


def test_without_verifying_only_the_sizes_are_compared(
    two_checkpoints: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(two_checkpoints, tmp_path / "copy")
    flip(folder / "iter_0000002")
    assert checkpoint.choose(folder) == folder / "iter_0000001"
    assert checkpoint.choose(folder, verify=False) == folder / "iter_0000002"
    truncate(folder / "iter_0000002")
    assert checkpoint.choose(folder, verify=False) == folder / "iter_0000001"


@ranks(2)
def expect_none_complete(folder: Path) -> None:
    model, optimizer = build(3, seed=2)
    with pytest.raises(InputError) as error:
        checkpoint.load(folder, model, optimizer)
    assert "iter_0000001: the content of __1_0.distcp changed" in str(error.value)
    assert "iter_0000002: __3_0.distcp is missing" in str(error.value)


def test_none_complete_is_an_error_that_names_each(two_checkpoints: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(two_checkpoints, tmp_path / "copy")
    flip(folder / "iter_0000001")
    lose_shard(folder / "iter_0000002")
    expect_none_complete(folder=folder)


@pytest.mark.parametrize("text", ["", "soon", None])
def test_newest_is_used_without_a_pointer(text: str, two_checkpoints: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(two_checkpoints, tmp_path / "copy")
    pointer = folder / POINTER
    pointer.unlink() if text is None else pointer.write_text(text)
    assert checkpoint.choose(folder) == folder / "iter_0000002"


def test_pointer_can_be_set_back(two_checkpoints: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(two_checkpoints, tmp_path / "copy")
    (folder / POINTER).write_text("1\n")
    assert checkpoint.choose(folder) == folder / "iter_0000001"


@ranks(2)
def save_with_a_limit_on_rank_one(folder: Path) -> None:
    model, optimizer = build(3, seed=1)
    train(model, optimizer, 1)
    checkpoint.save(folder, model, optimizer, state_at(1))
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    dist.barrier()
    disk = full_disk(4000) if dist.get_rank() == 1 else nullcontext()
    with disk, pytest.raises(InputError) as error:
        checkpoint.save(folder, model, optimizer, state_at(2))
    assert f"cannot save in {folder} (rank 1): File too large" in str(error.value)
    assert "needs" in str(error.value) and "are free" in str(error.value)
    dist.barrier()
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    checkpoint.save(folder, model, optimizer, state_at(2))  # and the ranks still work together
    assert checkpoint.choose(folder).name == "iter_0000002"


def test_full_disk_on_one_rank_fails_on_all(tmp_path: Path) -> None:
    save_with_a_limit_on_rank_one(folder=tmp_path)


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
    model, optimizer = build(3, seed=1)
    with pytest.raises(InputError, match="cannot save.*: No space left on device. The checkpoint"):
        for iteration in range(1, 100):
            train(model, optimizer, 1)
            checkpoint.save(folder, model, optimizer, state_at(iteration))
    assert iteration > 1
    assert checkpoint.load(folder, model, optimizer).iteration == iteration - 1
    assert names(folder) == [f"iter_{number:07d}" for number in range(1, iteration)]


def test_disk_that_fills_up_while_writing(small_disk: Path) -> None:
    fill_the_disk(folder=small_disk)


@ranks(2)
def save_something_large(folder: Path) -> None:
    model = nn.Linear(300, 300)  # 360 kB
    with pytest.raises(InputError) as error:
        checkpoint.save(folder, model, None, state_at(1))
    assert "too little space left" in str(error.value) and "361,200 bytes" in str(error.value)
    assert names(folder) == []


def test_space_is_checked_before_writing(small_disk: Path) -> None:
    save_something_large(folder=small_disk)


def test_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    model, optimizer = build(0, seed=1)
    with pytest.raises(InputError, match="cannot save in .*file"):
        checkpoint.save(tmp_path / "file" / "save", model, optimizer, state_at(1))


@ranks(2)
def fail_on_rank_one(folder: Path) -> None:
    model, optimizer = build(3, seed=1)
    if dist.get_rank() == 1:
        model.state_dict = None  # a mistake of ours, on one rank only
    with pytest.raises((TypeError, RuntimeError), match="'NoneType' object is not callable"):
        checkpoint.save(folder, model, optimizer, state_at(1))


def test_error_on_one_rank_reaches_all(tmp_path: Path) -> None:
    fail_on_rank_one(folder=tmp_path)
