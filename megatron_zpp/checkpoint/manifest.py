"""The folder of checkpoints on disk: each is there complete, or not at all.

    SAVE/iter_0000100/                       shards, state.json, manifest.json
    SAVE/latest_checkpointed_iteration.txt   100
    SAVE/.iter_0000150.tmp/                  one being written, or left over from a kill

A checkpoint is written aside with its manifest (size and SHA-256 of every file) last, flushed,
renamed, and only then pointed to. One that is saved again under its old name is moved to
`.iter_N.replaced` between two renames; a kill there loses nothing, as readers look there too.
Nothing here knows of tensors or ranks.
"""

import hashlib
import json
import re
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

from zeropp.atomic import sync_folder, write_atomically

POINTER = "latest_checkpointed_iteration.txt"
MANIFEST = "manifest.json"
FORMAT = 1
BLOCK = 1 << 20  # bytes read at once
_NAME = re.compile(r"iter_(\d{7,})$")


class DamagedError(Exception):
    """Says in what way a checkpoint is not complete."""


@dataclass(frozen=True)
class Entry:
    """What a file must be: its size and the hexadecimal SHA-256 of its content."""

    bytes: int
    sha256: str


def final_path(folder: Path, iteration: int) -> Path:
    """Where the complete checkpoint of an iteration lies."""
    return folder / f"iter_{iteration:07d}"


def aside_path(folder: Path, iteration: int) -> Path:
    """Where the checkpoint of an iteration is written before it is complete."""
    return folder / f".iter_{iteration:07d}.tmp"


def iteration_of(path: Path) -> int:
    """Return the iteration in a checkpoint's name; raises ValueError if it is none."""
    if not (match := _NAME.search(path.name.removesuffix(".replaced"))):
        raise ValueError(f"{path} is not named like a checkpoint, iter_0000100")
    return int(match[1])


def candidates(folder: Path) -> tuple[list[Path], str | None]:
    """List the checkpoints in the order in which to try them, and what is odd about the pointer.

    The one pointed to comes first (even if it is gone), then the older ones, newest first, then
    any that are newer. Without a usable pointer the newest comes first.
    """
    found = {}
    for path in sorted(folder.glob("iter_*")) + sorted(folder.glob(".iter_*.replaced")):
        if path.is_dir() and _NAME.search(path.name.removesuffix(".replaced")):
            found.setdefault(iteration_of(path), path)
    pointed, oddity = _pointed(folder)
    if pointed is None:
        return [found[number] for number in sorted(found, reverse=True)], oddity
    older = [found[number] for number in sorted(found, reverse=True) if number < pointed]
    newer = [found[number] for number in sorted(found) if number > pointed]
    if newer:
        oddity = f"{POINTER} says {pointed}; {newer[-1].name} is newer and is not used"
    return [found.get(pointed, final_path(folder, pointed)), *older, *newer], oddity


def entry_of(path: Path) -> Entry:
    """Read a file and return its size and checksum; raises OSError."""
    checksum, num_bytes = hashlib.sha256(), 0
    with open(path, "rb", buffering=0) as file:
        while block := file.read(BLOCK):
            checksum.update(block)
            num_bytes += len(block)
    return Entry(num_bytes, checksum.hexdigest())


def write_manifest(checkpoint: Path, entries: dict[str, Entry]) -> None:
    """Write the list of files that make a checkpoint complete, as its last file."""
    content = {"format": FORMAT, "files": {name: asdict(e) for name, e in entries.items()}}
    text = json.dumps(content, indent=1, sort_keys=True) + "\n"
    write_atomically(checkpoint / MANIFEST, lambda file: file.write(text.encode()))


def read_manifest(checkpoint: Path) -> dict[str, Entry]:
    """Return the files that a checkpoint must have; sizes are checked, checksums are not.

    Raises DamagedError naming what is missing, unreadable or of another size.
    """
    if not checkpoint.is_dir():
        raise DamagedError(f"{checkpoint.name} does not exist")
    try:
        content = json.loads((checkpoint / MANIFEST).read_bytes())
        entries = {name: Entry(**entry) for name, entry in content["files"].items()}
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


def check_content(checkpoint: Path, entries: dict[str, Entry]) -> None:
    """Read these files and compare their checksums; raises DamagedError naming the first."""
    for name, entry in entries.items():
        if entry_of(checkpoint / name) != entry:
            raise DamagedError(f"the content of {name} changed since it was written")


def publish(folder: Path, iteration: int) -> Path:
    """Make the checkpoint that was written aside the newest one; raises OSError."""
    aside, final = aside_path(folder, iteration), final_path(folder, iteration)
    replaced = folder / f".{final.name}.replaced"
    sync_folder(aside)
    if final.exists():
        final.rename(replaced)
    aside.rename(final)
    sync_folder(folder)
    write_atomically(folder / POINTER, lambda file: file.write(f"{iteration}\n".encode()))
    if replaced.exists():
        shutil.rmtree(replaced)
    return final


def clean(folder: Path) -> None:
    """Remove what an interrupted save left behind; raises OSError.

    Only for the folder that this run saves to: another run may be writing in others.
    """
    for replaced in folder.glob(".iter_*.replaced"):
        final = final_path(folder, iteration_of(replaced))
        if final.exists():
            shutil.rmtree(replaced)
        else:
            replaced.rename(final)
    for aside in folder.glob(".iter_*.tmp"):
        shutil.rmtree(aside)
    for aside in folder.glob(f".{POINTER}.*.tmp"):
        aside.unlink()


def prune(folder: Path, iteration: int, keep: int) -> list[Path]:
    """Remove complete checkpoints older than `iteration`, so that `keep` with it are left.

    Newer ones (after a step back) and folders that are not complete are left alone.
    """
    older = []
    for path in folder.glob("iter_*"):
        if _NAME.match(path.name) and iteration_of(path) < iteration and _looks_complete(path):
            older.append(path)
    superfluous = sorted(older, key=iteration_of, reverse=True)[max(keep - 1, 0) :]
    for path in superfluous:
        doomed = aside_path(folder, iteration_of(path))
        path.rename(doomed)  # at once: a kill must not leave half of it under its name
        shutil.rmtree(doomed)
    return superfluous


def _looks_complete(checkpoint: Path) -> bool:
    try:
        read_manifest(checkpoint)
    except DamagedError:
        return False
    return True


def _pointed(folder: Path) -> tuple[int | None, str | None]:
    """Return the iteration pointed to, or None, and what is wrong with the pointer, or None."""
    path = folder / POINTER
    if not path.exists():
        return None, None
    text = path.read_text(errors="replace").strip()
    if re.fullmatch(r"[0-9]+", text):
        return int(text), None
    return None, f"{POINTER} says {text[:40]!r} instead of a number; the newest checkpoint is used"
