"""manifest.json: the size and SHA-256 of every other file of a checkpoint.

It is written last, so it is the file that makes a checkpoint complete
(`zeropp.checkpoint.complete_or_absent`), and it tells whether a file was lost or changed since.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from zeropp.atomic import write_atomically
from zeropp.checkpoint import FileEntry, file_entry

MANIFEST = "manifest.json"
FORMAT = 1


class DamagedError(Exception):
    """Says which file of a checkpoint is missing or not as it was written."""


def write_manifest(checkpoint: Path, entries: Mapping[str, FileEntry]) -> None:
    """Write the manifest into a checkpoint, as its last file."""
    files = {name: asdict(entry) for name, entry in entries.items()}
    text = json.dumps({"format": FORMAT, "files": files}, indent=1, sort_keys=True) + "\n"
    write_atomically(checkpoint / MANIFEST, text)


def read_manifest(checkpoint: Path) -> dict[str, FileEntry]:
    """Return the files that a checkpoint must have; sizes are checked, checksums are not.

    Raises DamagedError that names what is missing, unreadable or of another size.
    """
    if not checkpoint.is_dir():
        raise DamagedError(f"{checkpoint.name} does not exist")
    try:
        content = json.loads((checkpoint / MANIFEST).read_bytes())
        entries = {name: FileEntry(**entry) for name, entry in content["files"].items()}
    except FileNotFoundError as error:
        raise DamagedError(f"{MANIFEST} is missing") from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise DamagedError(f"{MANIFEST} is not readable: {error}") from error
    for name, entry in entries.items():
        path = checkpoint / name
        if not path.is_file():
            raise DamagedError(f"{name} is missing")
        if path.stat().st_size != entry.bytes:
            size = path.stat().st_size
            raise DamagedError(f"{name} has {size} bytes instead of {entry.bytes}")
    return entries


def check_content(checkpoint: Path, entries: Mapping[str, FileEntry]) -> None:
    """Read these files and compare their checksums; raises DamagedError for the first mismatch."""
    for name, entry in entries.items():
        if file_entry(checkpoint / name) != entry:
            raise DamagedError(f"the content of {name} changed since it was written")
