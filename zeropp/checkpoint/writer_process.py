"""The process beside a rank that writes its part of a checkpoint; rank 0's also publishes it.

It is a new interpreter, so that it shares no thread and no lock with the rank. It does not import
torch, starts in a fraction of a second, and needs little more memory than one block of a file. The
rank's files are in shared memory (`memory_files.py`). The rank sends a `RankWrite` through a pipe;
the process answers with `Written` and, on rank 0, `Published`.

    .NAME.OWNER.tmp/__2_0.distcp   written by rank 2's process, with its checksum
    .NAME.OWNER.tmp/.2.written     then this: the names and checksums of rank 2's files
    .NAME.OWNER.tmp/LAST_FILE      by rank 0's process, once every rank's `.written` is there
    NAME                           by rank 0's process: the folder is renamed, the pointer replaced

A process ends with its rank. If that is killed, the process may have got anywhere in this list;
`complete_or_absent.py` says why that is safe.
"""

import hashlib
import json
import os
import signal
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple, Protocol

from zeropp.atomic import write_atomically
from zeropp.checkpoint.checksums import BLOCK, FileEntry
from zeropp.checkpoint.complete_or_absent import CheckpointFolder, require_visible
from zeropp.checkpoint.memory_files import Extent, read_blocks
from zeropp.errors import InputError, picklable

NICENESS = 10  # training goes first where there are too few cores
POLL_SECONDS = 0.1  # between two looks for other ranks' files, and for the parent

Entries = Mapping[str, FileEntry]  # by the file's name


class Note(NamedTuple):
    """A line for the rank's log."""

    level: int
    text: str


class SaveHooks(Protocol):
    """What rank 0's process does beside publishing; pickled, and imported without torch."""

    def add_last_files(self, partial: Path, entries: Entries) -> None:
        """Add the files that complete a checkpoint; `entries` are those that all ranks wrote."""

    def after_publication(self) -> list[Note]:
        """Do what comes after the publication, such as removing old checkpoints."""


@dataclass(frozen=True, kw_only=True)
class RankWrite:
    """One rank's part of one checkpoint. Only rank 0 has `hooks`."""

    rank: int
    num_ranks: int
    checkpoints: CheckpointFolder
    name: str
    pointer_text: str | None
    files: Mapping[str, Extent]
    hooks: SaveHooks | None


@dataclass(frozen=True, kw_only=True)
class Written:
    """A rank's files are on disk, or `error` says why not."""

    entries: Entries = field(default_factory=dict)
    error: Exception | None = None


@dataclass(frozen=True, kw_only=True)
class Published:
    """The checkpoint is complete under its name, or `error` says why not."""

    notes: tuple[Note, ...] = ()
    error: Exception | None = None


class AllWritten(NamedTuple):
    """From the rank: the files of all ranks are on disk."""

    entries: Entries


class Abort(NamedTuple):
    """From the rank: another rank's files could not be written."""


def serve(connection_descriptor: int, memory_descriptor: int) -> None:
    """Do one `RankWrite` after another until the rank closes the pipe or dies."""
    for number in (signal.SIGINT, signal.SIGTERM):  # it is the rank that reacts to them
        signal.signal(number, signal.SIG_IGN)
    os.nice(NICENESS)
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    connection = Connection(connection_descriptor)
    try:
        while True:
            message = connection.recv()
            if isinstance(message, RankWrite):  # else it is about the job before, which is done
                perform(message, memory_descriptor, connection)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return


def perform(job: RankWrite, memory_descriptor: int, connection: Connection) -> None:
    """Write a rank's files and report it; on rank 0 also publish the checkpoint and report that."""
    try:
        written = Written(entries=_write_files(job, memory_descriptor))
    except Exception as error:  # noqa: BLE001  (raised by the rank)
        written = Written(error=picklable(error))
    connection.send(written)
    if job.hooks is None or written.error is not None:
        return
    try:
        published = Published(notes=tuple(_publish(job, job.hooks, connection)))
    except EOFError:  # the rank is gone
        raise
    except Exception as error:  # noqa: BLE001  (raised by the rank)
        published = Published(error=picklable(error))
    connection.send(published)


def _write_files(job: RankWrite, memory_descriptor: int) -> dict[str, FileEntry]:
    partial = job.checkpoints.partial(job.name)
    entries = {
        name: _write_file(partial / name, memory_descriptor, extent)
        for name, extent in job.files.items()
    }
    text = json.dumps({name: asdict(entry) for name, entry in entries.items()})
    write_atomically(_written(partial, job.rank), lambda file: file.write(text.encode()))
    return entries


def _write_file(path: Path, memory_descriptor: int, extent: Extent) -> FileEntry:
    checksum = hashlib.sha256()
    with open(path, "wb") as file:
        for block in read_blocks(memory_descriptor, extent, BLOCK):
            checksum.update(block)
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
    return FileEntry(extent.bytes, checksum.hexdigest())


def _publish(job: RankWrite, hooks: SaveHooks, connection: Connection) -> list[Note]:
    partial = job.checkpoints.partial(job.name)
    entries = _entries_of_all_ranks(job, partial, connection)
    require_visible(partial, entries)
    for rank in range(job.num_ranks):
        _written(partial, rank).unlink(missing_ok=True)
    hooks.add_last_files(partial, entries)
    job.checkpoints.publish(job.name, job.pointer_text)
    return hooks.after_publication()


def _entries_of_all_ranks(job: RankWrite, partial: Path, connection: Connection) -> Entries:
    """Wait for all ranks' files: until their `.written` is seen, or the rank says so."""
    waiting = [_written(partial, rank) for rank in range(job.num_ranks)]
    entries: dict[str, FileEntry] = {}
    while True:
        for path in [path for path in waiting if path.exists()]:
            content = json.loads(path.read_text())
            entries |= {name: FileEntry(**entry) for name, entry in content.items()}
            waiting.remove(path)
        if not waiting:
            return entries
        if connection.poll(POLL_SECONDS):
            message = connection.recv()
            if isinstance(message, Abort):
                raise InputError("another rank could not write its files")
            return message.entries


def _written(partial: Path, rank: int) -> Path:
    return partial / f".{rank}.written"


def _end_with(parent: int) -> None:
    """End this process when its parent has died."""
    while os.getppid() == parent:
        time.sleep(POLL_SECONDS)
    os._exit(1)
