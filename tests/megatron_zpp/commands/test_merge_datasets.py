"""A merged dataset has the bytes of one that was written at once; bad input."""

from pathlib import Path

import numpy as np
import pytest

from megatron_zpp.commands.merge_datasets import main
from megatron_zpp.data.indexed_dataset import IndexedDataset
from tests.full_disk import full_disk
from tests.indexed import write

FILES = Path(__file__).parents[2] / "data"
PARTS = {
    "b": [[[1, 2, 3]], [], [[4], [5, 6]]],
    "a": [[[7]], [[8, 9], []]],
    "c": [[], [[10, 11]], []],
}


def with_modes(prefix: str, modes: list[int]) -> str:
    with open(f"{prefix}.idx", "ab") as file:
        file.write(np.array(modes, dtype=np.int8).tobytes())
    return prefix


@pytest.fixture
def parts(tmp_path: Path) -> Path:
    for name, documents in PARTS.items():
        write(tmp_path / "parts" / name, documents)
    return tmp_path / "parts"


def content(prefix: Path | str) -> tuple[bytes, bytes]:
    return tuple(Path(f"{prefix}{ending}").read_bytes() for ending in (".bin", ".idx"))


def test_a_folder_merges_in_the_order_of_names(parts: Path, tmp_path: Path, capsys) -> None:
    output = tmp_path / "deep" / "all"
    assert main(["--input", str(parts), "--output-prefix", str(output)]) == 0
    whole = write(tmp_path / "whole", [*PARTS["a"], *PARTS["b"], *PARTS["c"]])
    assert content(output) == content(whole)
    assert "8 documents, 7 sequences" in capsys.readouterr().out
    assert sorted(path.name for path in output.parent.iterdir()) == ["all.bin", "all.idx"]


def test_listed_prefixes_keep_their_order(parts: Path, tmp_path: Path) -> None:
    listed = [str(parts / name) for name in "cba"]
    assert main(["--input", *listed, "--output-prefix", str(tmp_path / "all")]) == 0
    whole = write(tmp_path / "whole", [*PARTS["c"], *PARTS["b"], *PARTS["a"]])
    assert content(tmp_path / "all") == content(whole)


def test_modes_are_kept(parts: Path, tmp_path: Path) -> None:
    first, second = with_modes(str(parts / "a"), [1, 0, 2]), with_modes(str(parts / "c"), [3])
    assert main(["--input", first, second, "--output-prefix", str(tmp_path / "all")]) == 0
    assert IndexedDataset(tmp_path / "all").modes.tolist() == [1, 0, 2, 3]
    assert IndexedDataset(parts / "b").modes is None


def test_what_does_not_fit_is_named(parts: Path, tmp_path: Path, capsys) -> None:
    wide = write(tmp_path / "wide", [[[1]]], 70_000)
    moded = with_modes(write(tmp_path / "moded", [[[1]]]), [1])
    (tmp_path / "empty").mkdir()
    half = tmp_path / "half"
    half.mkdir()
    (half / "text.bin").write_bytes(b"1")
    a, output = str(parts / "a"), str(tmp_path / "all")
    for inputs, target, message in (
        ([a, wide], output, "tokens of type uint16 and"),
        ([a, moded], output, f"{moded} has a mode for each sequence and {a} has none"),
        ([a, str(parts / "b")], a, "is one of the datasets to merge"),
        ([str(tmp_path / "empty")], output, "no pair of .bin and .idx"),
        ([str(half)], output, "text.idx is missing"),
        ([str(tmp_path / "none")], output, "no dataset at"),
    ):
        assert main(["--input", *inputs, "--output-prefix", target]) == 1
        assert message in capsys.readouterr().err
        assert not list(tmp_path.glob("all*"))
    assert main(["--input", a]) == 1


def test_a_full_disk_leaves_the_old_pair(parts: Path, tmp_path: Path, capsys) -> None:
    old = content(write(tmp_path / "all", [[[1, 2]]]))
    write(parts / "d", [[list(range(90)) * 30]])
    with full_disk(1000):
        status = main(["--input", str(parts), "--output-prefix", str(tmp_path / "all")])
    assert status == 1 and "too large" in capsys.readouterr().err
    assert content(tmp_path / "all") == old
    assert sorted(path.name for path in tmp_path.iterdir()) == ["all.bin", "all.idx", "parts"]
