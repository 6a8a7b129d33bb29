"""The report on a dataset: its counts, its problems, its histogram, and bad input."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from megatron_zpp.commands.inspect_dataset import BAR, HEIGHT, WIDTH, draw, main
from tests.indexed import write

FILES = Path(__file__).parents[2] / "data"
EOD = 99
NULL = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "100"]
CLEAN = [[[1, 2, 3, EOD]], [[4, 5], [6, EOD]], [[7, EOD]]]


def report(capsys: pytest.CaptureFixture, *argv: str) -> list[str]:
    assert main(["--input", *argv]) == 0
    return [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]


def test_a_clean_dataset(tmp_path: Path, capsys) -> None:
    lines = report(capsys, write(tmp_path / "text", CLEAN), *NULL, "--largest", "1")
    assert lines[1:4] == ["documents: 3", "sequences: 4", "tokens: 10"]
    assert "tokens of a document: mean 3.3, median 4, 80% of them 2 to 4, at most 4" in lines
    assert "largest: document 0, 4 tokens: '1 2 3 99'" in lines
    assert "token ids: 1 to 99" in lines
    assert lines[-1] == "no problem found"


def test_problems_are_found(tmp_path: Path, capsys) -> None:
    documents = [[[1, EOD]], [], [[2, EOD, 3], []], [], [[400, EOD, 5, 6]]]
    lines = report(capsys, write(tmp_path / "text", documents, 500), *NULL)
    problems = [line.removeprefix("problem: ") for line in lines if line.startswith("problem")]
    assert problems == [
        "2 of 5 documents are empty: 1, 3",
        "1 of 4 sequences hold no token",
        "1 tokens are outside the 100 ids of NullTokenizer: the text was preprocessed with another "
        "tokenizer",
        "2 of 3 documents do not end with the end-of-document id 99: preprocess with --append-eod",
        "the end-of-document id 99 stands 2 times inside documents",
    ]
    assert "largest: document 4, 4 tokens: ''" in lines  # the first id has no text


def test_without_a_tokenizer_and_without_tokens(tmp_path: Path, capsys) -> None:
    prefix = write(tmp_path / "text", CLEAN)
    lines = report(capsys, prefix)
    assert "token ids: 1 to 99" in lines and lines[-1] == "no problem found"
    assert "largest: document 0, 4 tokens: [1, 2, 3, 99]" in lines
    assert not any("token ids" in line for line in report(capsys, prefix, "--skip-tokens"))


def test_modes_are_counted(tmp_path: Path, capsys) -> None:
    prefix = write(tmp_path / "text", CLEAN)
    with open(f"{prefix}.idx", "ab") as file:
        file.write(np.array([0, 1, 1, 0], dtype=np.int8).tobytes())
    assert "sequences by mode: 0: 2, 1: 2" in report(capsys, prefix)


def test_the_picture_has_a_bar_for_each_power_of_two(tmp_path: Path, capsys) -> None:
    picture = tmp_path / "lengths.png"
    report(capsys, write(tmp_path / "text", CLEAN), "--histogram", str(picture))
    assert Image.open(picture).size == (WIDTH, HEIGHT)
    pixels = np.asarray(draw(np.array([0, 2, 3, 4, 4, 9]), "text"))
    blue = (pixels == [int(BAR[k : k + 2], 16) for k in (1, 3, 5)]).all(axis=2).any(axis=0)
    starts = np.flatnonzero(np.diff(blue.astype(int)) == 1)
    assert len(starts) == 4  # 0; 2 to 3; 4 to 7; 8 to 15; nothing of 1
    assert len(np.unique(np.diff(starts).round(-1))) == 2  # a gap where 1 would be


def test_a_truncated_file_is_named(tmp_path: Path, capsys) -> None:
    prefix = write(tmp_path / "text", CLEAN)
    path = Path(f"{prefix}.bin")
    path.write_bytes(path.read_bytes()[:-2])
    assert main(["--input", prefix]) == 1
    assert "text.bin has 18 bytes, but" in capsys.readouterr().err
