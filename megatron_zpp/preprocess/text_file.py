"""A text file, plain or compressed (.gz, .zst), read from start to end in bounded memory."""

import gzip
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from zeropp.errors import InputError

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

GZIP, ZSTANDARD = ".gz", (".zst", ".zstd")


class TextFile:
    """The decompressed bytes of a file; InputError names a file that is damaged or truncated."""

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
