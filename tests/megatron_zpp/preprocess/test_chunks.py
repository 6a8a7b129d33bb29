"""The kinds of input: equal text gives equal datasets, from any place on; damage is named."""

import gzip
import json
import pickle
import sys
from importlib import import_module
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from megatron_zpp.preprocess import chunks as module
from megatron_zpp.preprocess.chunks import InputPosition, read_chunks
from megatron_zpp.preprocess.partial_output import Journal, Totals
from tests.megatron_zpp.preprocess.runs import run, texts_of
from zeropp.errors import InputError

zstd = import_module("compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd")
TEXTS = [f"{number}é" * (number % 50) for number in range(2000)]


def json_lines(path: Path) -> Path:
    return _written(path, _lines())


def gzipped(path: Path) -> Path:
    """Two members, one after the other, as `cat a.gz b.gz` makes them."""
    half = len(_lines()) // 2
    parts = gzip.compress(_lines()[:half]) + gzip.compress(_lines()[half:])
    return _written(path.with_name("a.JSONL.GZ"), parts)


def zstandard(path: Path) -> Path:
    """Two frames, the second one as `zstd --long=31` makes it, with a window of 2 GiB."""
    half = len(_lines()) // 2
    names = zstd.CompressionParameter
    long = zstd.ZstdCompressor(options={names.window_log: 31, names.content_size_flag: 0})
    parts = zstd.compress(_lines()[:half]) + long.compress(_lines()[half:]) + long.flush()
    return _written(path.with_name("a.jsonl.zst"), parts)


def table(path: Path) -> Path:
    path = path.with_name("a.parquet")
    columns = pyarrow.table({"id": range(len(TEXTS)), "text": TEXTS})
    pyarrow.parquet.write_table(columns, path, row_group_size=300)
    return path


def _lines() -> bytes:
    return "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()


def _written(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("write", [json_lines, gzipped, zstandard, table])
def test_every_kind_of_file_gives_the_same_documents(tmp_path, write):
    path = write(tmp_path / "a.jsonl")
    assert texts_of(run(path, tmp_path / "x")) == TEXTS


@pytest.mark.parametrize("write", [json_lines, gzipped, zstandard, table])
def test_reading_goes_on_from_any_place(tmp_path, write, monkeypatch):
    monkeypatch.setattr(module, "CHUNK_BYTES", 5000)
    path = write(tmp_path / "a.jsonl")
    whole = list(read_chunks([path], ["text"], InputPosition()))
    assert len(whole) > 10
    assert whole[-1].bytes_read >= path.stat().st_size * 0.9
    for number in (0, 4, len(whole) - 2, len(whole) - 1):
        rest = list(read_chunks([path], ["text"], whole[number].end))
        expected = whole[number + 1 :]
        assert b"".join(chunk.data for chunk in rest) == b"".join(chunk.data for chunk in expected)
        assert [row for chunk in rest for row in chunk.rows] == [
            row for chunk in expected for row in chunk.rows
        ]
        assert [chunk.first for chunk in rest[:1]] == [chunk.first for chunk in expected[:1]]
    first = [chunk.first for chunk in whole[:2]]
    assert first == [1, 1 + (whole[0].data.count(b"\n") or len(whole[0].rows))]


@pytest.mark.parametrize("write", [json_lines, gzipped])
def test_a_worker_reads_a_plain_file_itself(tmp_path, write, monkeypatch):
    monkeypatch.setattr(module, "CHUNK_BYTES", 5000)
    path = write(tmp_path / "a.jsonl")
    if write is json_lines:
        path.write_bytes(module.BOM + path.read_bytes())
    chunks = list(read_chunks([path], ["text"], InputPosition()))
    pickled = [pickle.dumps(chunk) for chunk in chunks]
    assert (max(map(len, pickled)) < 1000) is (write is json_lines)
    assert b"".join(pickle.loads(data).content() for data in pickled) == _lines()
    for data, chunk in zip(pickled, chunks, strict=True):
        assert pickle.loads(data).content() == chunk.data
    if write is json_lines:
        path.write_bytes(_lines()[:5000])
        with pytest.raises(InputError, match="became shorter while it was read"):
            pickle.loads(pickled[-1]).content()


def test_a_folder_is_read_in_the_order_of_names(tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    _written(folder / "a.txt.gz", gzip.compress(b"one text\nof two lines"))
    _written(folder / "b.jsonl", b'\xef\xbb\xbf{"text": "with a byte order mark"}\n')
    _written(folder / "c.jsonl", b"")
    _written(folder / "d.jsonl.zst", b"")
    pyarrow.parquet.write_table(pyarrow.table({"text": ["row"]}), folder / "e.parquet")
    _written(folder / "f.txt", b"last")
    _written(folder / "g.csv", b"not this")
    expected = ["one text\nof two lines", "with a byte order mark", "row", "last"]
    assert texts_of(run(folder, tmp_path / "x")) == expected
    assert texts_of(run(folder / "[!a]*", tmp_path / "y")) == expected[1:]  # a pattern, quoted
    assert texts_of(run(tmp_path / "text?", tmp_path / "z")) == expected
    with pytest.raises(InputError, match=r"--input .*\*\.csv: it is not one of"):
        run(folder / "*.csv", tmp_path / "x")
    with pytest.raises(InputError, match=r"--input .*\*\.json: no such file or folder"):
        run(folder / "*.json", tmp_path / "x")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl.gz", gzip.compress(_lines())[:-20], "damaged or cut off (Compressed file ended"),
        ("a.jsonl.gz", b"plain", "damaged or cut off (Not a gzipped file"),
        ("a.jsonl.gz", b"\x1f\x8b\x08" + bytes(7) + b"\xff" * 99, "damaged or cut off (Error -3"),
        ("a.jsonl.zst", zstd.compress(_lines())[:-20], "damaged or cut off (Compressed file ended"),
        ("a.txt.zst", b"plain", "damaged or cut off (Unable to decompress"),
        ("a.parquet", b"plain", "not a parquet file, or a damaged one (Parquet"),
        ("a.parquet.gz", b"plain", "it is not one of .jsonl"),
    ],
)
def test_a_damaged_file_is_named_and_nothing_is_left(tmp_path, name, content, message):
    path = _written(tmp_path / name, content)
    with pytest.raises(InputError) as caught:
        run(path, tmp_path / "x")
    assert str(path) in str(caught.value) and message in str(caught.value)
    assert list(tmp_path.iterdir()) == [path]


def test_a_table_without_the_column_or_with_numbers(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"title": ["a", None], "n": [1, 2]}), path)
    for key, message in (
        ("text", "no column 'text' (its columns: title, n)"),
        ("n", "a.parquet, row 1: 'n' holds 1, expected a string"),
        ("title", "a.parquet, row 2: 'title' holds null, expected a string"),
    ):
        with pytest.raises(InputError) as caught:
            run(path, tmp_path / "x", json_keys=(key,))
        assert message in str(caught.value)


ENTRIES = {
    "place": {"file": 2, "offset": 300, "number": 4},
    "count": {"documents": 5, "tokens": 60, "blank": 1, "invalid": 1, "first_invalid": "a, line 2"},
    "read": 700,
    "sizes": [[120, 20, 48]],
    "complete": False,
}


def test_the_entries_of_a_journal_keep_their_names() -> None:
    """A run that an earlier version has begun can be resumed."""
    journal = Journal(
        position=InputPosition(file=2, offset=300, number=4),
        totals=Totals(documents=5, tokens=60, blank=1, invalid=1, first_invalid="a, line 2"),
        bytes_read=700,
        sizes=((120, 20, 48),),
    )
    entries = json.loads(json.dumps(journal.to_json()))
    assert entries == ENTRIES
    assert Journal.from_json(entries).to_json() == entries
