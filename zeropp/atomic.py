"""Files that exist complete or not at all: written aside, flushed to disk, then renamed."""

import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO


def write_atomically(path: Path | str, content: str | Callable[[BinaryIO], None]) -> None:
    """Write a text to a temporary neighbour of `path`, or call `content(file)`, and rename that.

    Raises whatever `content` or the file system raises; `path` is then as it was before.
    """
    path = Path(path)
    # Processes on several machines may have the same number.
    aside = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    try:
        with open(aside, "wb") as file:
            if isinstance(content, str):
                file.write(content.encode())
            else:
                content(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Flush a folder's entries, so that a rename in it survives a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
