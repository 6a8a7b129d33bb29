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
from megatron_zpp.checkpoint.iteration_folders import POINTER, candidates, checkpoint_name
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
from tests.megatron_zpp.train.training_runs import shared_folder
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
        checkpoint.save(shared / "file" / "save", model, optimizer, state_at(1))
    train(model, optimizer, 1)
    checkpoint.save(folder, model, optimizer, state_at(1))
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    dist.barrier()
    with full_disk(4000) if is_second else nullcontext(), pytest.raises(InputError) as error:
        checkpoint.save(folder, model, optimizer, state_at(2))
    assert f"cannot save in {folder} (rank 1): File too large" in str(error.value)
    assert "needs" in str(error.value) and "are free" in str(error.value)
    dist.barrier()
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    checkpoint.save(folder, model, optimizer, state_at(2))  # and the ranks still work together
    assert checkpoint.choose(folder).name == "iter_0000002"
    if is_second:
        model.state_dict = None
    with pytest.raises((TypeError, RuntimeError), match="'NoneType' object is not callable"):
        checkpoint.save(folder, model, optimizer, state_at(1))


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
        checkpoint.save(folder / "large", large, None, state_at(1))
    assert "too little space left" in str(error.value) and "361,200 bytes" in str(error.value)
    assert names(folder / "large") == []
    model, optimizer = build(3, seed=1)
    with pytest.raises(InputError, match="cannot save.*: No space left on device. The checkpoint"):
        for iteration in range(1, 100):
            train(model, optimizer, 1)
            checkpoint.save(folder, model, optimizer, state_at(iteration))
    assert iteration > 1
    assert checkpoint.load(folder, model, optimizer).iteration == iteration - 1
    assert names(folder) == [f"iter_{number:07d}" for number in range(1, iteration)]


def test_disk_that_is_too_small_or_fills_up_while_writing(small_disk: Path) -> None:
    fill_the_disk(folder=small_disk)
