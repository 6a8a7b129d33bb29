"""A folder of checkpoints holds only complete ones, however a save was interrupted."""

from pathlib import Path

import pytest

from tests.full_disk import full_disk
from zeropp.checkpoint.complete_or_absent import CheckpointFolder
from zeropp.checkpoint.shared_folder import new_checkpoint
from zeropp.errors import InputError


def folder_at(path: Path, own_names: str | None = None) -> CheckpointFolder:
    return CheckpointFolder(
        path=path, pointer="latest", last_file="last", own_names=own_names,
        disk_full_advice="Buy a disk.",
    )  # fmt: skip


def save(folder: CheckpointFolder, name: str, content: str) -> None:
    with new_checkpoint(folder, name, 1, pointer_text=name) as partial:
        (partial / "last").write_text(content)


def names(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir())


def test_a_checkpoint_is_complete_when_its_last_file_is_there(tmp_path):
    folder = folder_at(tmp_path / "new")
    save(folder, "a", "first")
    assert folder.is_complete(folder.path / "a") and folder.latest() == "a"
    with pytest.raises(InputError, match="has no last: the checkpoint is not complete"):
        with new_checkpoint(folder, "b", 1, pointer_text="b") as partial:
            (partial / "first").write_text("")
    assert names(folder.path) == ["a", "latest"] and folder.latest() == "a"


@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt()])
def test_an_error_while_saving_leaves_the_folder_unchanged(error, tmp_path):
    folder = folder_at(tmp_path)
    save(folder, "a", "first")
    with pytest.raises(type(error)), new_checkpoint(folder, "a", 1, None) as partial:
        (partial / "last").write_text("second")
        raise error
    assert names(tmp_path) == ["a", "latest"] and (tmp_path / "a/last").read_text() == "first"


def test_a_save_killed_between_the_two_renames_loses_nothing(tmp_path):
    folder = folder_at(tmp_path)
    save(folder, "a", "first")
    (tmp_path / "a").rename(tmp_path / ".a.replaced")
    assert folder.find("a") == tmp_path / ".a.replaced"
    with pytest.raises(ValueError), new_checkpoint(folder, "a", 1, None):
        raise ValueError
    assert folder.find("a") == tmp_path / "a" and names(tmp_path) == ["a", "latest"]
    (tmp_path / ".a.replaced").mkdir()  # killed after the second rename
    save(folder, "a", "second")
    assert names(tmp_path) == ["a", "latest"] and (tmp_path / "a/last").read_text() == "second"


@pytest.mark.parametrize(("own_names", "left"), [(None, [".b.tmp", ".latest.7.tmp"]), ("*", [])])
def test_leftovers_of_other_jobs_are_left_alone(own_names, left, tmp_path):
    (tmp_path / ".a.tmp").mkdir()
    (tmp_path / ".b.tmp").mkdir()
    if own_names is None:  # by its name it may be another job's
        (tmp_path / ".latest.7.tmp").write_text("b")
    save(folder_at(tmp_path, own_names), "a", "first")
    assert names(tmp_path) == [*left, "a", "latest"]


def test_a_full_disk_is_explained(tmp_path):
    folder = folder_at(tmp_path)
    with pytest.raises(InputError, match="needs 4,000,000,000,000,000 bytes, .* Buy a disk"):
        with new_checkpoint(folder, "a", 4 * 10**15, None):
            pass
    with pytest.raises(InputError, match="File too large.*needs 9 bytes"):
        with new_checkpoint(folder, "a", 9, None) as partial, full_disk(3):
            (partial / "last").write_text("four")
    assert names(tmp_path) == []
