"""Datasets that are being written, in a folder of their own, and the journal to go on from.

PREFIX.partial/  0.bin, 0.lengths, 0.documents (and 1.*, ... for further keys): tokens, int32 tokens
                 of each sequence, int64 sequences before each document and after the last
                 0.idx: when all is done
                 journal.json: the settings, the place in the input and the sizes that belong to it

The journal is written after what it counts has reached the disk; what a file holds beyond its size
there is cut off when a run goes on. At the end the files are renamed to their places, complete.
"""

import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from megatron_zpp.data.indexed_dataset import index_header
from megatron_zpp.preprocess.chunks import Place
from megatron_zpp.preprocess.encode import Encoded
from megatron_zpp.preprocess.rate import Count
from zeropp.atomic import sync_folder, write_atomically
from zeropp.errors import InputError

FORMAT = 1
PARTS = ("bin", "lengths", "documents")
BLOCK = 1 << 20  # numbers at once


@dataclass(frozen=True, kw_only=True)
class Journal:
    """How far a run has come: `sizes` in bytes for each key and part."""

    place: Place = Place()
    count: Count = Count()
    read: int = 0
    sizes: tuple[tuple[int, ...], ...] = ()
    complete: bool = False


class Partial:
    """The folder, held by one run at a time; InputError if it is another run's, or in use."""

    def __init__(self, folder: Path, settings: Mapping[str, Any], num_keys: int) -> None:
        self.folder, self.settings = folder, json.loads(json.dumps(settings))
        self._files: list[list[BinaryIO]] = []
        is_new = not folder.exists()
        with _writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(self._lock)
            raise InputError(f"{folder}: another run is writing there; wait for its end") from error
        try:
            self.journal = Journal() if is_new else self._read()
            if not self.journal.complete:
                self._open(num_keys)
        except BaseException:
            self.close()
            raise

    @property
    def sizes(self) -> tuple[tuple[int, ...], ...]:
        """Bytes written so far, for each key and part."""
        return tuple(tuple(file.tell() for file in files) for files in self._files)

    def write(self, datasets: Sequence[Encoded]) -> None:
        """Append a chunk, one `Encoded` for each key."""
        for (tokens, lengths, documents), new in zip(self._files, datasets, strict=True):
            before = lengths.tell() // 4
            ends = before + np.cumsum(new.sequences, dtype="<i8")
            with _writing(self.folder):
                _append(tokens, new.ids)
                _append(lengths, new.lengths.astype("<i4", copy=False))
                _append(documents, ends)

    def commit(self, journal: Journal) -> None:
        """Make all that `journal` counts safe on the disk, then the journal itself."""
        for files in self._files:
            for file in files:
                os.fsync(file.fileno())
        content = json.dumps({"format": FORMAT, "settings": self.settings, **asdict(journal)})
        path = self.folder / "journal.json"
        write_atomically(path, lambda file: file.write(content.encode()))
        self.journal = journal

    def complete(self, journal: Journal, dtype: np.dtype) -> None:
        """Write the indices, after which only renaming is left to do."""
        with _writing(self.folder):
            for key in range(len(self._files)):
                self._write_index(key, dtype)
            self.commit(replace(journal, complete=True))

    def place(self, prefixes: Sequence[str]) -> None:
        """Put all datasets in their places and remove the folder."""
        for key, prefix in enumerate(prefixes):
            self._place(key, Path(f"{prefix}.bin"), Path(f"{prefix}.idx"))
        self.remove()

    def close(self) -> None:
        """Close the files and let go of the folder, which stays."""
        for files in self._files:
            for file in files:
                file.close()
        self._files = []
        os.close(self._lock)

    def remove(self) -> None:
        """Remove the folder and all that was written."""
        shutil.rmtree(self.folder)
        self.close()

    def _read(self) -> Journal:
        path = self.folder / "journal.json"
        if not path.exists():
            return Journal()
        found = json.loads(path.read_text())
        if found.pop("format", None) != FORMAT:
            raise self._foreign("was begun by another version of this program")
        then = found.pop("settings")
        other = [name for name in self.settings if then.get(name) != self.settings[name]]
        if other:
            raise self._foreign(f"was begun with another {' and another '.join(other)}")
        place, count = Place(**found.pop("place")), Count(**found.pop("count"))
        return Journal(**{**found, "place": place, "count": count})

    def _foreign(self, why: str) -> InputError:
        return InputError(
            f"{self.folder} holds an unfinished run that {why}: repeat that run to finish it, "
            "delete the folder, or give another --output-prefix"
        )

    def _open(self, num_keys: int) -> None:
        """Open every part and cut off what the journal does not count."""
        sizes = self.journal.sizes or ((0, 0, 0),) * num_keys
        for key in range(num_keys):
            files = []
            self._files.append(files)
            for part, size in zip(PARTS, sizes[key], strict=True):
                path = self.folder / f"{key}.{part}"
                files.append(open(path, "ab", buffering=0))  # noqa: SIM115 (closed by close)
                if files[-1].tell() < size:
                    raise self._foreign(
                        f"is damaged ({path.name} is shorter than its journal says)"
                    )
                files[-1].truncate(size)
                files[-1].seek(size)
            if not files[-1].tell():
                _append(files[-1], np.zeros(1, dtype="<i8"))

    def _write_index(self, key: int, dtype: np.dtype) -> None:
        """The .idx of one dataset, in bounded memory."""
        lengths = np.memmap(self.folder / f"{key}.lengths", dtype="<i4", mode="r")
        documents = np.memmap(self.folder / f"{key}.documents", dtype="<i8", mode="r")

        def write(file: BinaryIO) -> None:
            file.write(index_header(dtype, len(lengths), len(documents)))
            for block in _blocks(lengths):
                file.write(block.tobytes())
            start = 0
            for block in _blocks(lengths):
                ends = start + np.cumsum(block, dtype="<i8") * dtype.itemsize
                file.write((ends - block.astype("<i8") * dtype.itemsize).tobytes())
                start = int(ends[-1])
            for block in _blocks(documents):
                file.write(block.tobytes())

        write_atomically(self.folder / f"{key}.idx", write)

    def _place(self, key: int, bin_path: Path, idx_path: Path) -> None:
        """Rename a dataset's files; a run that was stopped in between goes on here."""
        made_bin, made_idx = self.folder / f"{key}.bin", self.folder / f"{key}.idx"
        if made_bin.exists():
            # Without an index there is no dataset: a new .bin never meets an old .idx.
            idx_path.unlink(missing_ok=True)
            os.replace(made_bin, bin_path)
        if made_idx.exists():
            os.replace(made_idx, idx_path)
        sync_folder(idx_path.parent)


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise InputError(
            f"cannot write in {folder} ({error.strerror}): make room or give access there, or name "
            "another place with --output-prefix"
        ) from error


def _blocks(numbers: np.ndarray) -> list[np.ndarray]:
    return [numbers[start : start + BLOCK] for start in range(0, len(numbers), BLOCK)]


def _append(file: BinaryIO, numbers: np.ndarray) -> None:
    """Write all bytes; an unbuffered file may take only some at once."""
    left = memoryview(np.ascontiguousarray(numbers)).cast("B") if numbers.size else b""
    while len(left):
        left = left[file.write(left) :]
