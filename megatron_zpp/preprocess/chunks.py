"""The input as chunks of about a megabyte, from any place in it on, in the order of its files.

Lines are only counted here; whoever encodes a chunk takes them apart. A place is where a chunk
ends: the number of the file, and in the text of that file, decompressed, the byte (in a .parquet
the row), and the number of the next line or row, from 1.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron_zpp.preprocess.flags import PreprocessConfig
from megatron_zpp.preprocess.text_file import GZIP, ZSTANDARD, TextFile
from megatron_zpp.tokenizer.base import load_package
from zeropp.errors import InputError

LINES, WHOLE, TABLE = (".jsonl", ".json", ".ndjson"), ".txt", ".parquet"
WANTED = f"{', '.join((*LINES, WHOLE))} (also .gz or .zst), {TABLE}"
CHUNK_BYTES = 1 << 20  # of text that goes to a worker at once
ROWS = 64  # of a table, read at once
NEWLINE = ord("\n")
BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where to go on reading."""

    file: int = 0
    offset: int = 0
    number: int = 1


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """Some documents: lines as `data`, one whole text as `data`, or `rows` of texts by key.

    `end` is the place after it, `read` the bytes of its file on disk up to there. Where `data`
    stands in the file as it is, at `offset`, it is not sent to a worker, who reads it there.
    """

    path: Path
    first: int
    data: bytes = b""
    offset: int | None = None
    size: int = 0
    rows: tuple[tuple[object, ...], ...] = ()
    is_whole: bool = False
    end: Place
    read: int

    def __getstate__(self) -> dict[str, object]:
        return self.__dict__ | ({} if self.offset is None else {"data": b""})

    def content(self) -> bytes:
        """`data`, read again where it was not sent; InputError if it is not there any more."""
        if self.data or self.offset is None:
            return self.data
        with open(self.path, "rb") as file:
            file.seek(self.offset)
            data = file.read(self.size)
        if len(data) < self.size:
            raise InputError(f"{self.path}: became shorter while it was read")
        return data


def input_files(config: PreprocessConfig) -> list[Path]:
    """The files that --input means, those of a folder in the order of their names."""
    path = Path(config.input)
    if not path.exists():
        raise InputError(f"--input {path}: no such file or folder")
    files = [path]
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.is_file())
    files = [file for file in files if kind(file) in (*LINES, WHOLE, TABLE)]
    if not files:
        what = "no file in it is" if path.is_dir() else "it is not"
        raise InputError(f"--input {path}: {what} one of {WANTED}")
    if len(config.keys) > 1 and any(kind(file) == WHOLE for file in files):
        raise InputError(f"--json-keys {' '.join(config.keys)}: a {WHOLE} file has one text only")
    return files


def kind(path: Path) -> str:
    """What is in a file, by its name: the ending before .gz or .zst, in small letters."""
    endings = [ending.lower() for ending in path.suffixes]
    if endings and endings[-1] in (GZIP, *ZSTANDARD):
        endings.pop()
        return "" if endings[-1:] == [TABLE] else "".join(endings[-1:])
    return "".join(endings[-1:])


def chunks(files: Sequence[Path], keys: Sequence[str], start: Place) -> Iterator[Chunk]:
    """The content of the files from a place on; InputError for a file that cannot be read."""
    for number in range(start.file, len(files)):
        path, place = files[number], start if number == start.file else Place(file=number)
        if kind(path) == TABLE:
            yield from _tables(path, keys, place)
        elif kind(path) == WHOLE:
            yield _whole(path, place)
        else:
            yield from _lines(path, place)


def _whole(path: Path, place: Place) -> Chunk:
    with TextFile(path) as file:
        text = file.rest().removeprefix(BOM)
    end = Place(file=place.file + 1)
    size = path.stat().st_size
    return Chunk(path=path, first=1, data=text, is_whole=True, end=end, read=size)


def _lines(path: Path, place: Place) -> Iterator[Chunk]:
    offset, number = place.offset, place.number
    with TextFile(path) as file:
        file.skip(offset)
        while data := file.lines(CHUNK_BYTES):
            first, at_start = number, offset == 0
            offset += len(data)
            number += int(np.count_nonzero(np.frombuffer(data, np.uint8) == NEWLINE))
            end = Place(file=place.file, offset=offset, number=number)
            data = data.removeprefix(BOM) if at_start else data
            yield Chunk(
                path=path, first=first, data=data, size=len(data), end=end, read=file.read_bytes,
                offset=offset - len(data) if file.is_plain else None,
            )  # fmt: skip


def _tables(path: Path, keys: Sequence[str], place: Place) -> Iterator[Chunk]:
    pyarrow = load_package("pyarrow", f"{path}")
    library = load_package("pyarrow.parquet", f"{path}")
    size, row = path.stat().st_size, place.offset
    try:
        with library.ParquetFile(path, pre_buffer=False) as table:
            names, total = table.schema_arrow.names, table.metadata.num_rows
            missing = [key for key in keys if key not in names]
            if missing:
                raise InputError(
                    f"{path}: no column {missing[0]!r} (its columns: {', '.join(names)}); "
                    "see --json-keys"
                )
            for rows in _gathered(table, keys, row):
                first, row = row + 1, row + len(rows)
                end = Place(file=place.file, offset=row, number=row + 1)
                yield Chunk(path=path, first=first, rows=rows, end=end, read=size * row // total)
    except pyarrow.ArrowException as error:
        raise InputError(f"{path}: not a parquet file, or a damaged one ({error})") from error


def _gathered(table: object, keys: Sequence[str], skipped: int) -> Iterator[tuple]:
    """Rows of a table after the first `skipped`, about a megabyte at once."""
    groups, sizes = [], [table.metadata.row_group(n).num_rows for n in range(table.num_row_groups)]
    for number, size in enumerate(sizes):
        if skipped >= size and not groups:
            skipped -= size
        else:
            groups.append(number)
    rows, num_bytes = [], 0
    if not groups:
        return
    for batch in table.iter_batches(ROWS, row_groups=groups, columns=list(keys), use_threads=False):
        if skipped >= batch.num_rows:
            skipped -= batch.num_rows
            continue
        batch, skipped = batch.slice(skipped), 0
        rows += zip(*(batch.column(key).to_pylist() for key in keys), strict=True)
        num_bytes += batch.nbytes
        if num_bytes >= CHUNK_BYTES:
            yield tuple(rows)
            rows, num_bytes = [], 0
    if rows:
        yield tuple(rows)
