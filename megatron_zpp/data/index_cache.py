"""Indices of samples and blends on disk, in Megatron's place: built once, then mapped by all.

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from megatron_zpp.data.blend import blend_index, exhaustive_blend_index
from megatron_zpp.data.sample_index import (
    SampleIndex,
    SampleRequest,
    build_sample_index,
    plan_epochs,
)
from zeropp.atomic import write_atomically
from zeropp.errors import InputError

PARTS = ("document", "sample", "shuffle")
BLEND_PARTS = ("dataset", "dataset_sample")
FORMAT = 1  # raised when the same request gives other arrays
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # of file systems without them

logger = logging.getLogger("megatron_zpp")


class IndexCache:
    """Keeps the indices in `folder`, or beside each dataset if that is None.

    One process builds an index, the others wait and say so. Where it cannot be kept InputError is
    raised; with `required` False it is built in memory, and a warning says so once.
    """

    def __init__(self, folder: str | Path | None, required: bool = True) -> None:
        self._folder = None if folder is None else Path(folder)
        self._required = required
        self._said = False

    def sample_index(
        self, lengths: np.ndarray, request: SampleRequest, prefix: str, split: str
    ) -> SampleIndex:
        """As `build_sample_index`, of the dataset `prefix`; its arrays are mapped, not read.

        Raises InputError for files in the folder that are damaged or made from something else.
        """
        entry = _Entry(
            folder=self._place(prefix, "GPTDataset"),
            stem=f"GPTDataset-{split}",
            made_from=_described(lengths, request),
            shapes=dict(zip(PARTS, _shapes(lengths, request), strict=True)),
        )

        def build() -> list[np.ndarray]:
            try:
                index = build_sample_index(lengths, request)
            except (MemoryError, OverflowError, ValueError) as error:  # NumPy has one for each size
                raise InputError(
                    f"the index of {request.num_samples} {split} samples of {request.seq_length} "
                    f"tokens from the {request.tokens(lengths)} of {prefix} does not fit into "
                    f"memory ({error}): ask for fewer samples, or give more text"
                ) from error
            return [getattr(index, part) for part in PARTS]

        return SampleIndex(**dict(zip(PARTS, self._kept(entry, build), strict=True)))

    def blend_index(
        self, weights: Sequence[float], size: int | None, prefix: str, split: str
    ) -> tuple[np.ndarray, np.ndarray]:
        """As `blend_index`; with `size` None as `exhaustive_blend_index`. Mapped, not read.

        `prefix` is the first dataset: the index lies beside it where no folder is named.
        """
        total = sum(weights) if size is None else size
        entry = _Entry(
            folder=self._place(prefix, "BlendedDataset"),
            stem=f"BlendedDataset-{split}",
            made_from={"format": FORMAT, "weights": list(weights), "size": size},
            shapes={part: (total,) for part in BLEND_PARTS},
        )

        def build() -> tuple[np.ndarray, np.ndarray]:
            return exhaustive_blend_index(weights) if size is None else blend_index(weights, size)

        dataset, sample = self._kept(entry, build)
        return dataset, sample

    def _place(self, prefix: str, kind: str) -> Path:
        return self._folder or Path(prefix, "cache", f"{kind}_indices")

    def _kept(
        self, entry: "_Entry", build: Callable[[], Sequence[np.ndarray]]
    ) -> Sequence[np.ndarray]:
        """The arrays of an entry from its files, which `build` fills where there are none."""
        if not entry.is_complete():
            try:
                entry.folder.mkdir(parents=True, exist_ok=True)
                with _alone(entry):
                    if not entry.is_complete():
                        _write(build(), entry)
            except OSError as error:
                self._refuse_or_say(entry.folder, error)
                return build()
        return _load(entry)

    def _refuse_or_say(self, folder: Path, error: OSError) -> None:
        why = f"cannot keep the sample index in {folder} ({error.strerror or error})"
        if self._required:
            raise InputError(
                f"{why}: name a folder with room and write access with --data-cache-path"
            ) from error
        if not self._said:
            logger.warning("%s; it is built in memory each time", why)
        self._said = True


@dataclass(frozen=True, kw_only=True)
class _Entry:
    """The files of one index: where, what they are made from, and the shape of each array."""

    folder: Path
    stem: str
    made_from: Mapping[str, Any]
    shapes: Mapping[str, tuple[int, ...]]

    @property
    def description(self) -> str:
        """What the arrays are made from; their names contain its hash."""
        return json.dumps(self.made_from, indent=1)

    @property
    def name(self) -> str:
        """How the names of all files begin."""
        digest = hashlib.md5(self.description.encode(), usedforsecurity=False).hexdigest()
        return f"{digest}-{self.stem}"

    @property
    def arrays(self) -> list[Path]:
        """The files of the arrays."""
        return [self.folder / f"{self.name}-{part}_index.npy" for part in self.shapes]

    @property
    def text(self) -> Path:
        """The file that says what the arrays are made from."""
        return self.folder / f"{self.name}-description.txt"

    def is_complete(self) -> bool:
        """Whether all files are there."""
        return all(path.is_file() for path in (self.text, *self.arrays))

    def remove(self) -> None:
        """Remove what is there of it, the leftovers of processes that were killed included."""
        leftovers = self.folder.glob(f".{self.name}-*.tmp")
        for path in (self.text, *self.arrays, *leftovers):
            path.unlink(missing_ok=True)


@contextmanager
def _alone(entry: _Entry) -> Iterator[None]:
    """Hold the lock of an entry; without locks on this file system, go on and say so."""
    path = entry.folder / f".{entry.name}.lock"
    descriptor = _locked(path, entry)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(descriptor)  # and with it the lock


def _locked(path: Path, entry: _Entry) -> int:
    """A descriptor of the file `path` that holds its lock."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            _lock(descriptor, entry)
            if _is_open(path, descriptor):
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # who held it before has removed the file: that lock is nobody's


def _is_open(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _lock(descriptor: int, entry: _Entry) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return
    except BlockingIOError:
        logger.info("waiting for another process that builds %s in %s", entry.name, entry.folder)
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        logger.info("no locks in %s: every process builds its own index", entry.folder)
        return
    fcntl.flock(descriptor, fcntl.LOCK_EX)


def _write(arrays: Sequence[np.ndarray], entry: _Entry) -> None:
    """Write all files of an entry, or none."""
    entry.remove()
    try:
        for path, array in zip(entry.arrays, arrays, strict=True):
            write_atomically(path, lambda file, array=array: _save(file, array))
        write_atomically(entry.text, lambda file: file.write(entry.description.encode()))
    except BaseException:
        entry.remove()
        raise


def _save(file: BinaryIO, array: np.ndarray) -> None:
    """Write an .npy file; np.save does not notice when the disk is full at its last bytes."""
    np.lib.format.write_array_header_1_0(file, np.lib.format.header_data_from_array_1_0(array))
    file.write(np.ascontiguousarray(array).data)


def _load(entry: _Entry) -> list[np.ndarray]:
    advice = "delete it and start again"
    if entry.text.read_text() != entry.description:
        raise InputError(f"the cached index {entry.text} is of other data or settings: {advice}")
    arrays = []
    for path, shape in zip(entry.arrays, entry.shapes.values(), strict=True):
        try:
            array = np.load(path, mmap_mode="r", allow_pickle=False)
        except (ValueError, OSError, EOFError) as error:
            raise InputError(f"the cached index {path} is damaged ({error}): {advice}") from error
        if array.shape != shape or array.dtype.kind not in "iu":
            raise InputError(
                f"the cached index {path} holds {array.dtype} {list(array.shape)} where "
                f"{list(shape)} is expected, it is of other data or another version: {advice}"
            )
        arrays.append(array)
    return arrays


def _described(lengths: np.ndarray, request: SampleRequest) -> dict[str, Any]:
    """All that the arrays of a request depend on, for `lengths` int32 [all sequences]."""
    used = np.ascontiguousarray(lengths[request.sequences.start : request.sequences.stop])
    return {
        "format": FORMAT,
        "lengths": hashlib.md5(used.tobytes(), usedforsecurity=False).hexdigest(),
        "sequences": [request.sequences.start, request.sequences.stop],
        "seq_length": request.seq_length,
        "num_samples": request.num_samples,
        "seed": request.seed,
    }


def _shapes(lengths: np.ndarray, request: SampleRequest) -> list[tuple[int, ...]]:
    """Shapes of the three arrays."""
    tokens = request.tokens(lengths)
    count = plan_epochs(tokens, request.seq_length, request.num_samples).count
    samples = (count * tokens - 1) // request.seq_length
    return [(count * len(request.sequences),), (samples + 1, 2), (samples,)]
