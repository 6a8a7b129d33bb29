"""Sample indices on disk, in Megatron's place and under its names: built once, then mapped.

A name contains a hash of all that the arrays depend on, so other data, another seed or another
version of this code never meet an old file. Files appear complete or not at all. Whoever builds
holds a lock on the folder; others that want the same arrays wait for it, on this machine and on
every other that shares the folder.
"""

import errno
import fcntl
import hashlib
import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from megatron_zpp.data.sample_index import (
    SampleIndex,
    SampleRequest,
    build_sample_index,
    plan_epochs,
)
from zeropp.atomic import write_atomically
from zeropp.errors import InputError

PARTS = ("document", "sample", "shuffle")
FORMAT = 1  # raised when the same request gives other arrays
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # of file systems without them

logger = logging.getLogger("megatron_zpp")


@dataclass(frozen=True, kw_only=True)
class Entry:
    """The files of one index in a folder."""

    folder: Path
    stem: str
    description: str

    @classmethod
    def of(cls, lengths: np.ndarray, request: SampleRequest, folder: Path, split: str) -> "Entry":
        """The place of what `request` makes of `lengths` int32 [all sequences of the dataset]."""
        used = np.ascontiguousarray(lengths[request.sequences.start : request.sequences.stop])
        fields = {
            "format": FORMAT,
            "lengths": hashlib.md5(used.tobytes(), usedforsecurity=False).hexdigest(),
            "sequences": [request.sequences.start, request.sequences.stop],
            "seq_length": request.seq_length,
            "num_samples": request.num_samples,
            "seed": request.seed,
        }
        description = json.dumps(fields, indent=1)
        digest = hashlib.md5(description.encode(), usedforsecurity=False).hexdigest()
        return cls(folder=folder, stem=f"{digest}-GPTDataset-{split}", description=description)

    @property
    def arrays(self) -> list[Path]:
        """The files of the three arrays."""
        return [self.folder / f"{self.stem}-{part}_index.npy" for part in PARTS]

    @property
    def text(self) -> Path:
        """The file that says what the arrays are made from."""
        return self.folder / f"{self.stem}-description.txt"

    def is_complete(self) -> bool:
        """Whether all files are there."""
        return all(path.is_file() for path in (self.text, *self.arrays))

    def remove(self) -> None:
        """Remove what is there of it, the leftovers of processes that were killed included."""
        leftovers = self.folder.glob(f".{self.stem}-*.tmp")
        for path in (self.text, *self.arrays, *leftovers):
            path.unlink(missing_ok=True)


def cached_sample_index(
    lengths: np.ndarray, request: SampleRequest, folder: Path, split: str
) -> SampleIndex:
    """As `build_sample_index`, kept in `folder`; its arrays are mapped, not read.

    One process builds it, the others wait and say so. Raises InputError if `folder` cannot be
    written, and for files in it that are damaged or made from something else.
    """
    entry = Entry.of(lengths, request, folder, split)
    if not entry.is_complete():
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with _alone(entry):
                if not entry.is_complete():
                    _write(build_sample_index(lengths, request), entry)
        except OSError as error:
            raise InputError(
                f"cannot keep the sample index in {folder} ({error.strerror or error}): "
                "name a folder with room and write access with --data-cache-path"
            ) from error
    return _load(entry, _shapes(lengths, request))


@contextmanager
def _alone(entry: Entry) -> Iterator[None]:
    """Hold the lock of an entry; without locks on this file system, go on and say so."""
    path = entry.folder / f".{entry.stem}.lock"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        _lock(descriptor, entry)
        try:
            yield
        finally:
            path.unlink(missing_ok=True)
    finally:
        os.close(descriptor)  # and with it the lock


def _lock(descriptor: int, entry: Entry) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return
    except BlockingIOError:
        logger.info("waiting for another process that builds %s in %s", entry.stem, entry.folder)
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        logger.info("no locks in %s: every process builds its own index", entry.folder)
        return
    fcntl.flock(descriptor, fcntl.LOCK_EX)


def _write(index: SampleIndex, entry: Entry) -> None:
    """Write all files of an entry, or none."""
    entry.remove()
    try:
        for path, part in zip(entry.arrays, PARTS, strict=True):
            array = getattr(index, part)
            write_atomically(path, lambda file, array=array: _save(file, array))
        write_atomically(entry.text, lambda file: file.write(entry.description.encode()))
    except BaseException:
        entry.remove()
        raise


def _save(file: BinaryIO, array: np.ndarray) -> None:
    """Write an .npy file; np.save does not notice when the disk is full at its last bytes."""
    np.lib.format.write_array_header_1_0(file, np.lib.format.header_data_from_array_1_0(array))
    file.write(np.ascontiguousarray(array).data)


def _shapes(lengths: np.ndarray, request: SampleRequest) -> list[tuple[int, ...]]:
    """Shapes of the three arrays."""
    tokens = request.tokens(lengths)
    count = plan_epochs(tokens, request.seq_length, request.num_samples).count
    samples = (count * tokens - 1) // request.seq_length
    return [(count * len(request.sequences),), (samples + 1, 2), (samples,)]


def _load(entry: Entry, shapes: list[tuple[int, ...]]) -> SampleIndex:
    advice = "delete it and start again"
    if entry.text.read_text() != entry.description:
        raise InputError(f"the cached index {entry.text} is of other data or settings: {advice}")
    arrays = []
    for path, shape in zip(entry.arrays, shapes, strict=True):
        try:
            array = np.load(path, mmap_mode="r", allow_pickle=False)
        except (ValueError, OSError) as error:
            raise InputError(f"the cached index {path} is damaged ({error}): {advice}") from error
        if array.shape != shape or array.dtype.kind not in "iu":
            raise InputError(
                f"the cached index {path} holds {array.dtype} {list(array.shape)} where "
                f"{list(shape)} is expected, it is of other data or another version: {advice}"
            )
        arrays.append(array)
    return SampleIndex(**dict(zip(PARTS, arrays, strict=True)))
