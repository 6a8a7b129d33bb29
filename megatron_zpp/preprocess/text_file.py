"""A file of text, plain or compressed (.gz, .zst), read from front to back in bounded memory."""

import gzip
import sys
import zlib
from pathlib import Path

from megatron_zpp.tokenizer.base import load_package
from zeropp.errors import InputError

GZIP, ZSTANDARD = ".gz", (".zst", ".zstd")
BLOCK = 1 << 20  # bytes


class TextFile:
    """Bytes of the text in a file; InputError names a file that is damaged or cut off."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._raw = self._text = open(path, "rb")  # noqa: SIM115 (closed by __exit__)
        self._errors: tuple[type[Exception], ...] = (EOFError, gzip.BadGzipFile, zlib.error)
        ending = path.suffix.lower()
        if ending == GZIP:
            self._text = gzip.GzipFile(fileobj=self._raw, mode="rb")
        elif ending in ZSTANDARD and path.stat().st_size:
            library = _zstandard(path)
            self._errors += (library.ZstdError,)
            self._text = library.ZstdFile(self._raw)

    def __enter__(self) -> "TextFile":
        return self

    def __exit__(self, *error: object) -> None:
        if not self.is_plain:
            self._text.close()
        self._raw.close()

    @property
    def is_plain(self) -> bool:
        """Whether the text is the file, not compressed."""
        return self._text is self._raw

    @property
    def read_bytes(self) -> int:
        """Bytes of the file on disk that were read so far."""
        return self._raw.tell()

    def lines(self, size: int) -> bytes:
        """The next lines, so many bytes and the rest of the last line; b"" at the end."""
        try:
            data = self._text.read(size)
            return data if not data or data.endswith(b"\n") else data + self._text.readline()
        except self._errors as error:
            raise self._damaged(error) from error

    def rest(self) -> bytes:
        """All that was not read yet."""
        try:
            return self._text.read()
        except self._errors as error:
            raise self._damaged(error) from error

    def skip(self, offset: int) -> None:
        """Go to a byte of the text: at once in a plain file, by reading in a compressed one."""
        if self.is_plain:
            self._raw.seek(offset)
            return
        try:
            while offset > 0:
                data = self._text.read(min(offset, BLOCK))
                offset -= len(data) if data else offset
        except self._errors as error:
            raise self._damaged(error) from error

    def _damaged(self, error: Exception) -> InputError:
        return InputError(f"{self.path}: damaged or cut off ({error})")


def _zstandard(path: Path) -> object:
    """Python's own module from 3.14 on, the same as a package before."""
    needed_by = f"the file {path}"
    return load_package(
        "compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd", needed_by
    )
