"""Whether a compiled library is current, by the hash of its sources."""

import ctypes
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from zeropp.native import library as module
from zeropp.native.library import (
    INT,
    RECORD,
    SOURCES,
    SUFFIX,
    LibraryError,
    expected_hash,
    load,
    source_hash,
)


def build(folder: Path, source: str) -> Path:
    """A library `_some` of one source in a folder; skips the test if there is no compiler."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++ here to compile a library")
    (folder / "some.cpp").write_text(source)
    path = folder / ("_some" + SUFFIX)
    command = [compiler, "-shared", "-fPIC", str(folder / "some.cpp"), "-o", str(path)]
    subprocess.run(command, check=True)
    return path


def with_hash(text: str) -> str:
    return (
        f'extern "C" const char* zpp_source_hash() {{ return "{text}"; }}\n'
        'extern "C" long twice(long number) { return 2 * number; }\n'
    )


def test_a_library_of_these_sources_is_loaded_with_its_functions_declared(tmp_path):
    build(tmp_path, with_hash(source_hash()))
    library = load(tmp_path, "_some", {"twice": (INT,)})
    library.twice.restype = INT
    assert library.twice(1 << 40) == 1 << 41
    with pytest.raises(ctypes.ArgumentError):
        library.twice("no number")


def test_a_library_of_other_sources_is_refused(tmp_path):
    path = build(tmp_path, with_hash("0" * 64))
    with pytest.raises(LibraryError, match=f"{path} was built from other sources; install again"):
        load(tmp_path, "_some", {"twice": (INT,)})


def test_a_library_without_a_hash_is_refused(tmp_path):
    (tmp_path / ("_some" + SUFFIX)).symlink_to(torch._C.__file__)
    with pytest.raises(LibraryError, match="was built from other sources"):
        load(tmp_path, "_some", {})


def test_a_library_of_these_sources_is_not_built_again():
    path = Path(module.__file__).with_name("_cpu" + SUFFIX)
    if not path.exists():
        pytest.skip("csrc/ was not built here")
    before = path.stat().st_mtime_ns
    command = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
    subprocess.run(command, cwd=SOURCES.parent, check=True, capture_output=True)
    assert path.stat().st_mtime_ns == before


def test_a_library_that_is_not_there(tmp_path):
    with pytest.raises(LibraryError, match="csrc/ was not built here"):
        load(tmp_path, "_some", {})
    with pytest.raises(LibraryError, match="^no nvcc$"):
        load(tmp_path, "_some", {}, "no nvcc")


def copy_of_sources(folder: Path) -> Path:
    copy = folder / "csrc"
    shutil.copytree(SOURCES, copy)
    return copy


@pytest.mark.parametrize("name", ["quantize/math.h", "index/index.cpp", "adam/cuda.cu", "flags.py"])
def test_a_change_in_any_source_changes_the_hash(tmp_path, name):
    copy = copy_of_sources(tmp_path)
    assert source_hash(copy) == source_hash()
    with (copy / name).open("a") as file:
        file.write("\n")
    assert source_hash(copy) != source_hash()


def test_the_hash_knows_names_and_ignores_what_compilers_do_not_read(tmp_path):
    copy = copy_of_sources(tmp_path)
    (copy / "quantize/math.h.orig").write_text("an editor's copy")
    assert source_hash(copy) == source_hash()
    (copy / "quantize/math.h").rename(copy / "quantize/maths.h")
    assert source_hash(copy) != source_hash()


def test_an_installed_package_compares_with_the_hash_of_its_build(tmp_path, monkeypatch):
    """As a wheel, which has no csrc/: setup.py recorded the hash."""
    assert expected_hash() == source_hash()
    monkeypatch.setattr(module, "PACKAGE", tmp_path)
    record = tmp_path / RECORD
    record.parent.mkdir()
    record.write_text("abc123\n")
    assert expected_hash() == "abc123"
    build(tmp_path, with_hash("abc123"))
    load(tmp_path, "_some", {"twice": (INT,)})
