"""The unfinished output of a preprocessing run, and the journal from which it can be resumed.

PREFIX.partial/  0.bin, 0.lengths, 0.documents (1.*, ... for further keys): tokens; int32 tokens of
                 each sequence; int64 sequences before each document and after the last one
                 0.idx: written when all text is encoded
                 journal.json: the settings, the position in the input, the sizes of the files

The journal is written after the data that it describes has reached the disk. When a run resumes,
each file is truncated to its size in the journal. At the end the files are moved to their final
paths.
"""

import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO

import numpy as np

from megatron_zpp.data.indexed_dataset import write_index
from megatron_zpp.preprocess.chunks import InputPosition
from megatron_zpp.preprocess.encoder import EncodedChunk, EncodedTexts
from zeropp.atomic import sync_folder, write_atomically
from zeropp.errors import InputError

JOURNAL = "journal.json"
FORMAT = 1  # of the journal
PARTS = ("bin", "lengths", "documents")
# Fields of a `Journal` that have another name in the file.
ENTRIES = MappingProxyType({"position": "place", "totals": "count", "bytes_read": "read"})


@dataclass(frozen=True, kw_only=True)
class Totals:
    """Documents and tokens that were written, blank and invalid lines that were skipped."""

    documents: int = 0
    tokens: int = 0
    blank: int = 0
    invalid: int = 0
    first_invalid: str = ""

    def plus(self, chunk: EncodedChunk) -> "Totals":
        """Return the totals with one more chunk."""
        return replace(
            self,
            documents=self.documents + len(chunk.datasets[0].sequences),
            tokens=self.tokens + sum(len(dataset.ids) for dataset in chunk.datasets),
            blank=self.blank + chunk.num_blank,
            invalid=self.invalid + chunk.num_invalid,
            first_invalid=self.first_invalid or chunk.first_invalid,
        )


@dataclass(frozen=True, kw_only=True)
class Journal:
    """The progress of a run.

    position: where reading continues. bytes_read: bytes of the input files before it. sizes: bytes
    of each part of each key. complete: all text is encoded, and the indices are written.
    """

    position: InputPosition = InputPosition()
    totals: Totals = Totals()
    bytes_read: int = 0
    sizes: tuple[tuple[int, ...], ...] = ()
    complete: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return the entries of journal.json."""
        return {ENTRIES.get(name, name): value for name, value in asdict(self).items()}

    @classmethod
    def from_json(cls, entries: Mapping[str, Any]) -> "Journal":
        """Return the journal with the entries of journal.json."""
        known = {each.name: entries[ENTRIES.get(each.name, each.name)] for each in fields(cls)}
        known["position"] = InputPosition(**known["position"])
        return cls(**known | {"totals": Totals(**known["totals"])})


class PartialOutput:
    """The folder of an unfinished run, locked by one run at a time.

    Raises InputError if the folder is in use, or belongs to a run with other settings.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any], num_keys: int) -> None:
        self.folder, self.settings = folder, json.loads(json.dumps(settings))
        self._files: list[list[BinaryIO]] = []
        is_new = not folder.exists()
        with _explain_write_error(folder):
            folder.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(self._lock)
            raise InputError(f"{folder}: another run is writing there; wait for its end") from error
        try:
            self.journal = Journal() if is_new else self._read_journal()
            if not self.journal.complete:
                self._open_files(num_keys)
        except BaseException:
            self.close()
            raise

    @property
    def sizes(self) -> tuple[tuple[int, ...], ...]:
        """Return the bytes written so far, for each key and part."""
        return tuple(tuple(file.tell() for file in files) for files in self._files)

    def write(self, datasets: Sequence[EncodedTexts]) -> None:
        """Append a chunk, with one `EncodedTexts` for each key."""
        for files, encoded in zip(self._files, datasets, strict=True):
            tokens_file, lengths_file, documents_file = files
            num_sequences = lengths_file.tell() // 4  # int32
            document_ends = num_sequences + np.cumsum(encoded.sequences, dtype="<i8")
            with _explain_write_error(self.folder):
                _append(tokens_file, encoded.ids)
                _append(lengths_file, encoded.lengths.astype("<i4", copy=False))
                _append(documents_file, document_ends)

    def commit(self, journal: Journal) -> None:
        """Flush the files to the disk, then write the journal that describes them."""
        for files in self._files:
            for file in files:
                os.fsync(file.fileno())
        entries = {"format": FORMAT, "settings": self.settings, **journal.to_json()}
        write_atomically(self.folder / JOURNAL, json.dumps(entries))
        self.journal = journal

    def complete(self, journal: Journal, dtype: np.dtype) -> None:
        """Write the indices and commit; after that, only `move_to` remains to be done."""
        with _explain_write_error(self.folder):
            for key_index in range(len(self._files)):
                self._write_index(key_index, dtype)
            self.commit(replace(journal, complete=True))

    def move_to(self, prefixes: Sequence[str]) -> None:
        """Move the dataset of each key to its prefix, and remove the folder."""
        for key_index, prefix in enumerate(prefixes):
            self._move_dataset(key_index, Path(f"{prefix}.bin"), Path(f"{prefix}.idx"))
        self.remove()

    def close(self) -> None:
        """Close the files and release the lock; the folder remains."""
        for files in self._files:
            for file in files:
                file.close()
        self._files = []
        os.close(self._lock)

    def remove(self) -> None:
        """Remove the folder with all its files."""
        shutil.rmtree(self.folder)
        self.close()

    def _read_journal(self) -> Journal:
        path = self.folder / JOURNAL
        if not path.exists():
            return Journal()
        entries = json.loads(path.read_text())
        if entries.get("format") != FORMAT:
            raise self._foreign_run_error("was begun by another version of this program")
        earlier = entries["settings"]
        changed = [name for name in self.settings if earlier.get(name) != self.settings[name]]
        if changed:
            names = " and another ".join(changed)
            raise self._foreign_run_error(f"was begun with another {names}")
        return Journal.from_json(entries)

    def _foreign_run_error(self, why: str) -> InputError:
        return InputError(
            f"{self.folder} holds an unfinished run that {why}: repeat that run to finish it, "
            "delete the folder, or give another --output-prefix"
        )

    def _open_files(self, num_keys: int) -> None:
        """Open the files of every key, and truncate them to their sizes in the journal."""
        sizes = self.journal.sizes or ((0, 0, 0),) * num_keys
        for key_index in range(num_keys):
            files = []
            self._files.append(files)
            for part, size in zip(PARTS, sizes[key_index], strict=True):
                path = self.folder / f"{key_index}.{part}"
                file = open(path, "ab", buffering=0)  # noqa: SIM115 (closed by close)
                files.append(file)
                if file.tell() < size:
                    raise self._foreign_run_error(
                        f"is damaged ({path.name} is shorter than its journal says)"
                    )
                file.truncate(size)
                file.seek(size)
            documents_file = files[-1]
            if not documents_file.tell():
                _append(documents_file, np.zeros(1, dtype="<i8"))

    def _write_index(self, key_index: int, dtype: np.dtype) -> None:
        """Write the .idx of one dataset."""
        lengths = np.memmap(self.folder / f"{key_index}.lengths", dtype="<i4", mode="r")
        documents = np.memmap(self.folder / f"{key_index}.documents", dtype="<i8", mode="r")
        write_atomically(
            self.folder / f"{key_index}.idx",
            lambda file: write_index(file, dtype, lengths, documents),
        )

    def _move_dataset(self, key_index: int, bin_path: Path, idx_path: Path) -> None:
        """Rename the files of a dataset; a run that was stopped in between continues here."""
        partial_bin = self.folder / f"{key_index}.bin"
        partial_idx = self.folder / f"{key_index}.idx"
        if partial_bin.exists():
            # Without an index there is no dataset: a new .bin is never read with an old .idx.
            idx_path.unlink(missing_ok=True)
            os.replace(partial_bin, bin_path)
        if partial_idx.exists():
            os.replace(partial_idx, idx_path)
        sync_folder(idx_path.parent)


@contextmanager
def _explain_write_error(folder: Path) -> Iterator[None]:
    """Raise InputError with advice instead of an OSError."""
    try:
        yield
    except OSError as error:
        raise InputError(
            f"cannot write in {folder} ({error.strerror}): make room or give access there, or name "
            "another place with --output-prefix"
        ) from error


def _append(file: BinaryIO, numbers: np.ndarray) -> None:
    """Write all bytes; `write` of an unbuffered file may write only a part of them."""
    if not numbers.size:
        return
    remaining = memoryview(np.ascontiguousarray(numbers)).cast("B")
    while len(remaining):
        remaining = remaining[file.write(remaining) :]
