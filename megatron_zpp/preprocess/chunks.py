"""Read the input files in chunks of about one megabyte, starting at any position.

Lines are only counted here; the worker that encodes a chunk splits it into lines.
"""

import glob
import gzip
import sys
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np

from megatron_zpp.preprocess.preprocess_config import PreprocessConfig
from megatron_zpp.tokenizer.base import load_package
from zeropp.errors import InputError

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

GZIP, ZSTANDARD = ".gz", (".zst", ".zstd")
JSON_LINES, PLAIN_TEXT, PARQUET = (".jsonl", ".json", ".ndjson"), ".txt", ".parquet"
FORMATS = f"{', '.join((*JSON_LINES, PLAIN_TEXT))} (also .gz or .zst), {PARQUET}"
CHUNK_BYTES = 1 << 20  # of text that is sent to a worker at once
ROWS_PER_BATCH = 64  # rows of a parquet file that are read at once
NEWLINE = ord("\n")
BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, kw_only=True)
class InputPosition:
    """A position in the input, at which reading can start.

    file: index of the file. offset: byte in the decompressed text of the file, or row of a parquet
    file. number: number of the next line or row, counted from 1.
    """

    file: int = 0
    offset: int = 0
    number: int = 1


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """Consecutive documents of one file.

    data: lines of JSON, or the whole text if `is_whole`. rows: the values of each row of a parquet
    file, by key. first: number of the first line or row. end: position after the chunk. bytes_read:
    bytes of the file on disk up to the end of the chunk. offset, size: where `data` is in an
    uncompressed file; it is then not pickled, and the worker reads it from the file.
    """

    path: Path
    first: int
    data: bytes = b""
    offset: int | None = None
    size: int = 0
    rows: tuple[tuple[object, ...], ...] = ()
    is_whole: bool = False
    end: InputPosition
    bytes_read: int

    def __getstate__(self) -> dict[str, object]:
        if self.offset is None:
            return self.__dict__
        return self.__dict__ | {"data": b""}

    def content(self) -> bytes:
        """Return `data`, read from the file if it was not pickled.

        Raises InputError if the file became shorter.
        """
        if self.data or self.offset is None:
            return self.data
        with open(self.path, "rb") as file:
            file.seek(self.offset)
            data = file.read(self.size)
        if len(data) < self.size:
            raise InputError(f"{self.path}: became shorter while it was read")
        return data


def input_files(config: PreprocessConfig) -> list[Path]:
    """Return the files of --input, a path or a pattern; those of a folder by their names.

    Raises InputError if there is none, or none in a format that can be read.
    """
    name = config.input
    paths = [Path(path) for path in ([name] if Path(name).exists() else sorted(glob.glob(name)))]
    if not paths:
        raise InputError(f"--input {name}: no such file or folder")
    found = [sorted(path.rglob("*")) if path.is_dir() else [path] for path in paths]
    files = [file for file in chain(*found) if file.is_file()]
    files = [file for file in files if file_format(file) in (*JSON_LINES, PLAIN_TEXT, PARQUET)]
    if not files:
        subject = "it is not" if paths == [*chain(*found)] else "no file in it is"
        raise InputError(f"--input {name}: {subject} one of {FORMATS}")
    if len(config.keys) > 1 and any(file_format(file) == PLAIN_TEXT for file in files):
        raise InputError(
            f"--json-keys {' '.join(config.keys)}: a {PLAIN_TEXT} file has one text only"
        )
    return files


def file_format(path: Path) -> str:
    """Return the format of a file: the suffix of its name before .gz or .zst, in lower case.

    Return "" if there is no suffix, and for a compressed parquet file, which cannot be read.
    """
    suffixes = [suffix.lower() for suffix in path.suffixes]
    is_compressed = bool(suffixes) and suffixes[-1] in (GZIP, *ZSTANDARD)
    if is_compressed:
        suffixes.pop()
    if not suffixes or (is_compressed and suffixes[-1] == PARQUET):
        return ""
    return suffixes[-1]


def read_chunks(
    files: Sequence[Path], keys: Sequence[str], start: InputPosition
) -> Iterator[Chunk]:
    """Yield the content of the files from `start` on, in the order of the files.

    Raises InputError for a file that cannot be read.
    """
    for number in range(start.file, len(files)):
        path = files[number]
        position = start if number == start.file else InputPosition(file=number)
        if file_format(path) == PARQUET:
            yield from _parquet_chunks(path, keys, position)
        elif file_format(path) == PLAIN_TEXT:
            yield _whole_text_chunk(path, position)
        else:
            yield from _line_chunks(path, position)


def _whole_text_chunk(path: Path, position: InputPosition) -> Chunk:
    with TextFile(path) as file:
        text = file.read_rest().removeprefix(BOM)
    return Chunk(
        path=path,
        first=1,
        data=text,
        is_whole=True,
        end=InputPosition(file=position.file + 1),
        bytes_read=path.stat().st_size,
    )


def _line_chunks(path: Path, position: InputPosition) -> Iterator[Chunk]:
    offset, number = position.offset, position.number
    with TextFile(path) as file:
        file.skip(offset)
        while data := file.read_lines(CHUNK_BYTES):
            first, is_file_start = number, offset == 0
            offset += len(data)
            number += int(np.count_nonzero(np.frombuffer(data, np.uint8) == NEWLINE))
            end = InputPosition(file=position.file, offset=offset, number=number)
            data = data.removeprefix(BOM) if is_file_start else data
            yield Chunk(
                path=path,
                first=first,
                data=data,
                size=len(data),
                end=end,
                bytes_read=file.bytes_read,
                offset=offset - len(data) if file.is_plain else None,
            )


def _parquet_chunks(path: Path, keys: Sequence[str], position: InputPosition) -> Iterator[Chunk]:
    pyarrow = load_package("pyarrow", f"{path}")
    parquet = load_package("pyarrow.parquet", f"{path}")
    file_bytes, row = path.stat().st_size, position.offset
    try:
        with parquet.ParquetFile(path, pre_buffer=False) as table:
            names, num_rows = table.schema_arrow.names, table.metadata.num_rows
            missing = [key for key in keys if key not in names]
            if missing:
                raise InputError(
                    f"{path}: no column {missing[0]!r} (its columns: {', '.join(names)}); "
                    "see --json-keys"
                )
            for rows in _row_groups(table, keys, row):
                first, row = row + 1, row + len(rows)
                yield Chunk(
                    path=path,
                    first=first,
                    rows=rows,
                    end=InputPosition(file=position.file, offset=row, number=row + 1),
                    bytes_read=file_bytes * row // num_rows,
                )
    except pyarrow.ArrowException as error:
        raise InputError(f"{path}: not a parquet file, or a damaged one ({error})") from error


def _row_groups(table: object, keys: Sequence[str], num_skipped: int) -> Iterator[tuple]:
    """Yield the rows of a table after the first `num_skipped`, about one megabyte at a time."""
    rows, num_bytes = [], 0
    for batch in table.iter_batches(ROWS_PER_BATCH, columns=list(keys), use_threads=False):
        if num_skipped >= batch.num_rows:
            num_skipped -= batch.num_rows
            continue
        batch, num_skipped = batch.slice(num_skipped), 0
        rows += zip(*(batch.column(key).to_pylist() for key in keys), strict=True)
        num_bytes += batch.nbytes
        if num_bytes >= CHUNK_BYTES:
            yield tuple(rows)
            rows, num_bytes = [], 0
    if rows:
        yield tuple(rows)


class TextFile:
    """The decompressed bytes of a file, read from start to end in bounded memory.

    Raises InputError, which names the file, if it is damaged or truncated.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._raw = self._text = open(path, "rb")  # noqa: SIM115 (closed by __exit__)
        self._errors: tuple[type[Exception], ...] = (EOFError, gzip.BadGzipFile, zlib.error)
        suffix = path.suffix.lower()
        if suffix == GZIP:
            self._text = gzip.GzipFile(fileobj=self._raw, mode="rb")
        elif suffix in ZSTANDARD and path.stat().st_size:
            self._errors += (zstd.ZstdError,)
            window = zstd.DecompressionParameter.window_log_max  # zstd --long=31 needs the largest
            self._text = zstd.ZstdFile(self._raw, options={window: window.bounds()[1]})

    def __enter__(self) -> "TextFile":
        return self

    def __exit__(self, *error: object) -> None:
        if not self.is_plain:
            self._text.close()
        self._raw.close()

    @property
    def is_plain(self) -> bool:
        """Return whether the file is not compressed."""
        return self._text is self._raw

    @property
    def bytes_read(self) -> int:
        """Return the bytes of the file on disk that were read so far."""
        return self._raw.tell()

    def read_lines(self, num_bytes: int) -> bytes:
        """Return the next `num_bytes` and the rest of the last line; b"" at the end of the file."""
        with self._explain_errors():
            data = self._text.read(num_bytes)
            if not data or data.endswith(b"\n"):
                return data
            return data + self._text.readline()

    def read_rest(self) -> bytes:
        """Return everything that was not read yet."""
        with self._explain_errors():
            return self._text.read()

    def skip(self, offset: int) -> None:
        """Move to a byte of the text, from the start: a compressed file is read up to there."""
        with self._explain_errors():
            self._text.seek(offset)

    @contextmanager
    def _explain_errors(self) -> Iterator[None]:
        """Raise InputError instead of an error of the decompression library."""
        try:
            yield
        except self._errors as error:
            raise InputError(f"{self.path}: damaged or cut off ({error})") from error
