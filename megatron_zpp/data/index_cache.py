"""Cache the indices of samples and blends in files, where Megatron stores them.

An index is built once and then mapped by all processes. The names of its files contain a hash of
everything that the arrays depend on, so that other data, another seed or another version of this
code never use it. The files appear complete or not at all. The process that builds an index holds a
lock; others that need the same index wait for it, on all machines that share the folder.
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
FORMAT = 1  # increment it if the same request gives other arrays
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # file systems without locks

logger = logging.getLogger("megatron_zpp")


class IndexCache:
    """Indices in `folder`, or next to each dataset if it is None.

    One process builds an index, and the others log that they wait. If an index cannot be written,
    InputError is raised; with `required` False, the index is built in memory, with one warning.
    """

    def __init__(self, folder: str | Path | None, required: bool = True) -> None:
        self._folder = None if folder is None else Path(folder)
        self._required = required
        self._has_warned = False

    def sample_index(
        self, lengths: np.ndarray, request: SampleRequest, prefix: str, split: str
    ) -> SampleIndex:
        """Return `build_sample_index` of the dataset `prefix`, with memory-mapped arrays.

        Raises InputError for files in the folder that are damaged or belong to other data.
        """
        entry = _Entry(
            folder=self._entry_folder(prefix, "GPTDataset"),
            stem=f"GPTDataset-{split}",
            inputs=_index_inputs(lengths, request),
            shapes=dict(zip(PARTS, _index_shapes(lengths, request), strict=True)),
        )

        def build() -> list[np.ndarray]:
            try:
                index = build_sample_index(lengths, request)
            except (MemoryError, OverflowError, ValueError) as error:  # depending on the size
                raise InputError(
                    f"the index of {request.num_samples} {split} samples of {request.seq_length} "
                    f"tokens from the {request.num_tokens(lengths)} of {prefix} does not fit into "
                    f"memory ({error}): ask for fewer samples, or give more text"
                ) from error
            return [getattr(index, part) for part in PARTS]

        return SampleIndex(**dict(zip(PARTS, self._load_or_build(entry, build), strict=True)))

    def blend_index(
        self, weights: Sequence[float], size: int | None, prefix: str, split: str
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return `blend_index`, or `exhaustive_blend_index` if `size` is None, memory-mapped.

        `prefix` is the first dataset; without a folder the index is stored next to it.
        """
        total = sum(weights) if size is None else size
        entry = _Entry(
            folder=self._entry_folder(prefix, "BlendedDataset"),
            stem=f"BlendedDataset-{split}",
            inputs={"format": FORMAT, "weights": list(weights), "size": size},
            shapes={part: (total,) for part in BLEND_PARTS},
        )

        def build() -> tuple[np.ndarray, np.ndarray]:
            if size is None:
                return exhaustive_blend_index(weights)
            return blend_index(weights, size)

        dataset, sample = self._load_or_build(entry, build)
        return dataset, sample

    def _entry_folder(self, prefix: str, kind: str) -> Path:
        return self._folder or Path(prefix, "cache", f"{kind}_indices")

    def _load_or_build(
        self, entry: "_Entry", build: Callable[[], Sequence[np.ndarray]]
    ) -> Sequence[np.ndarray]:
        """Return the arrays of an entry, from its files or, if they are missing, from `build`."""
        if not entry.is_complete():
            try:
                entry.folder.mkdir(parents=True, exist_ok=True)
                with _locked(entry):
                    if not entry.is_complete():
                        _write(build(), entry)
            except OSError as error:
                if error.errno == errno.EMFILE:
                    raise
                self._raise_or_warn(entry.folder, error)
                return build()
        return _load(entry)

    def _raise_or_warn(self, folder: Path, error: OSError) -> None:
        problem = f"cannot keep the sample index in {folder} ({error.strerror or error})"
        if self._required:
            raise InputError(
                f"{problem}: name a folder with room and write access with --data-cache-path"
            ) from error
        if not self._has_warned:
            logger.warning("%s; it is built in memory each time", problem)
        self._has_warned = True


@dataclass(frozen=True, kw_only=True)
class _Entry:
    """The files of one index: their folder, the inputs of the arrays, and the shape of each."""

    folder: Path
    stem: str
    inputs: Mapping[str, Any]
    shapes: Mapping[str, tuple[int, ...]]

    @property
    def description(self) -> str:
        """Return everything that the arrays depend on; the file names contain its hash."""
        return json.dumps(self.inputs, indent=1)

    @property
    def name(self) -> str:
        """Return the prefix of all file names."""
        digest = hashlib.md5(self.description.encode(), usedforsecurity=False).hexdigest()
        return f"{digest}-{self.stem}"

    @property
    def array_paths(self) -> list[Path]:
        """Return the paths of the arrays."""
        return [self.folder / f"{self.name}-{part}_index.npy" for part in self.shapes]

    @property
    def description_path(self) -> Path:
        """Return the path of the file with `description`."""
        return self.folder / f"{self.name}-description.txt"

    def is_complete(self) -> bool:
        """Return whether all files exist."""
        return all(path.is_file() for path in (self.description_path, *self.array_paths))

    def remove(self) -> None:
        """Remove all files, and temporary files of processes that were killed."""
        leftovers = self.folder.glob(f".{self.name}-*.tmp")
        for path in (self.description_path, *self.array_paths, *leftovers):
            path.unlink(missing_ok=True)


@contextmanager
def _locked(entry: _Entry) -> Iterator[None]:
    """Hold the lock of an entry; on a file system without locks, continue with a message."""
    path = entry.folder / f".{entry.name}.lock"
    descriptor = _open_locked(path, entry)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(descriptor)  # releases the lock


def _open_locked(path: Path, entry: _Entry) -> int:
    """Return a descriptor of the file `path` that holds its lock."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            _lock(descriptor, entry)
            if _is_same_file(path, descriptor):
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # the previous holder has removed the file, so the lock is void


def _is_same_file(path: Path, descriptor: int) -> bool:
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
    """Write all files of an entry, or none of them."""
    entry.remove()
    try:
        for path, array in zip(entry.array_paths, arrays, strict=True):
            write_atomically(path, lambda file, array=array: _save(file, array))
        write_atomically(entry.description_path, entry.description)
    except BaseException:
        entry.remove()
        raise


def _save(file: BinaryIO, array: np.ndarray) -> None:
    """Write an .npy file; np.save does not report a disk that is full at the last bytes."""
    np.lib.format.write_array_header_1_0(file, np.lib.format.header_data_from_array_1_0(array))
    file.write(np.ascontiguousarray(array).data)


def _load(entry: _Entry) -> list[np.ndarray]:
    """Map the arrays of an entry; raise InputError if they are damaged or of other data."""
    advice = "delete it and start again"
    if entry.description_path.read_text() != entry.description:
        raise InputError(
            f"the cached index {entry.description_path} is of other data or settings: {advice}"
        )
    arrays = []
    for path, shape in zip(entry.array_paths, entry.shapes.values(), strict=True):
        try:
            array = np.load(path, mmap_mode="r", allow_pickle=False)
        except (ValueError, OSError, EOFError) as error:
            if getattr(error, "errno", None) == errno.EMFILE:
                raise
            raise InputError(f"the cached index {path} is damaged ({error}): {advice}") from error
        if array.shape != shape or array.dtype.kind not in "iu":
            raise InputError(
                f"the cached index {path} holds {array.dtype} {list(array.shape)} where "
                f"{list(shape)} is expected, it is of other data or another version: {advice}"
            )
        arrays.append(array)
    return arrays


def _index_inputs(lengths: np.ndarray, request: SampleRequest) -> dict[str, Any]:
    """Return everything that the arrays depend on, for `lengths` int32 [all sequences]."""
    split_lengths = np.ascontiguousarray(lengths[request.sequences.start : request.sequences.stop])
    return {
        "format": FORMAT,
        "lengths": hashlib.md5(split_lengths.tobytes(), usedforsecurity=False).hexdigest(),
        "sequences": [request.sequences.start, request.sequences.stop],
        "seq_length": request.seq_length,
        "num_samples": request.num_samples,
        "seed": request.seed,
    }


def _index_shapes(lengths: np.ndarray, request: SampleRequest) -> list[tuple[int, ...]]:
    """Return the shapes of the three arrays."""
    num_tokens = request.num_tokens(lengths)
    count = plan_epochs(num_tokens, request.seq_length, request.num_samples).count
    num_samples = (count * num_tokens - 1) // request.seq_length
    return [(count * len(request.sequences),), (num_samples + 1, 2), (num_samples,)]
