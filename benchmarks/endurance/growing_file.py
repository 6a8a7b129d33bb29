"""A text file that others append to or replace, of which each reading takes only what is new."""

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Generic, TypeVar

T = TypeVar("T")


class GrowingFile(Generic[T]):
    """What `parse` returns for the complete lines of a file, without None."""

    def __init__(self, path: Path, parse: Callable[[str], T | None]) -> None:
        self._path, self._parse = path, parse
        self._inode = self._offset = 0
        self._items: list[T] = []

    def items(self) -> list[T]:
        """Return all items so far; none before the file exists."""
        with suppress(FileNotFoundError), self._path.open("rb") as file:
            inode = os.fstat(file.fileno()).st_ino
            if inode != self._inode:  # another file has taken its place
                self._inode, self._offset, self._items = inode, 0, []
            file.seek(self._offset)
            text = file.read()
            complete = text[: text.rfind(b"\n") + 1]
            self._offset += len(complete)
            parsed = map(self._parse, complete.decode(errors="replace").splitlines())
            self._items += [item for item in parsed if item is not None]
        return self._items
