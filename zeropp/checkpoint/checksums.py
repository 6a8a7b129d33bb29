"""Size and SHA-256 of files. Nothing here needs torch."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

BLOCK = 1 << 20  # bytes read at once


@dataclass(frozen=True)
class FileEntry:
    """Size of a file in bytes and the hexadecimal SHA-256 of its content."""

    bytes: int
    sha256: str


def file_entry(path: Path) -> FileEntry:
    """Read a file and return its size and checksum; raises OSError."""
    checksum, num_bytes = hashlib.sha256(), 0
    with open(path, "rb", buffering=0) as file:
        while block := file.read(BLOCK):
            checksum.update(block)
            num_bytes += len(block)
    return FileEntry(num_bytes, checksum.hexdigest())
