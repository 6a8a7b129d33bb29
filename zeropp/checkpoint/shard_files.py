"""Tensors in torch.distributed.checkpoint's files: each rank writes and reads its own shards.

A checkpoint loads at any number of ranks and any ZeRO stage: its metadata says which part of which
tensor is in which file.
"""

import io
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import (
    FileSystem,
    FileSystemReader,
    FileSystemWriter,
)
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.futures import Future
from torch.serialization import get_crc32_options, set_crc32_options

from zeropp.checkpoint.memory_files import MemoryFiles
from zeropp.errors import InputError
from zeropp.ranks.coordination import RankError, current_group, rank, world_size

METADATA = ".metadata"  # written last, by rank 0: which part of which tensor is in which file
ADVICE = "restore it, or load another checkpoint"


def write_shards(target: Path | MemoryFiles, tensors: Mapping[str, Tensor]) -> None:
    """Write `tensors` (DTensors, or tensors equal on all ranks); to be called by all ranks.

    The files are in the folder `target`, or for the time being in memory, the same byte by byte.
    """
    with _saving():
        in_memory = isinstance(target, MemoryFiles)
        writer = _MemoryWriter(target) if in_memory else _Writer(target)
        dcp.save(
            dict(tensors),
            storage_writer=writer,
            process_group=current_group(),
            no_dist=world_size() == 1,  # a single rank need not pickle its plan for itself
        )


def write_one_by_one(
    folder: Path, tensors: Mapping[str, Tensor], read: Callable[[str], Tensor]
) -> None:
    """Write a file for each tensor, from one process; memory holds one tensor at a time.

    `tensors` are on the meta device and give shapes and dtypes; `read(name)` returns the values.
    """
    with _saving():
        # A writer holds what goes into a file until that file is complete.
        writer = _Writer(folder, single_file_per_rank=False)
        planner = _ReadWhenWritten(read)
        dcp.save(dict(tensors), storage_writer=writer, planner=planner, no_dist=True)


def write_plan(folder: Path, planner: DefaultSavePlanner) -> None:
    """Write what `planner` plans, from one process; a file for each part, read when written."""
    with _saving():
        writer = _Writer(folder, single_file_per_rank=False)
        dcp.save({}, storage_writer=writer, planner=planner, no_dist=True)


def read_shards(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Fill `tensors` in place, each rank its shards; to be called by all ranks.

    Raises InputError, maybe within a CheckpointException, naming a file that is damaged.
    """
    with _without_warnings():
        dcp.load(dict(tensors), storage_reader=Reader(folder), process_group=current_group())


def saved_tensors(folder: Path) -> dict[str, Tensor]:
    """Shape and dtype of each tensor in a checkpoint by name, as tensors on the meta device.

    Raises InputError if the metadata is damaged.
    """
    metadata = Reader(folder).read_metadata()
    return {
        name: torch.empty(entry.size, dtype=entry.properties.dtype, device="meta")
        for name, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }


@contextmanager
def damage_as_input_errors(path: Path) -> Iterator[None]:
    """Raise an InputError that calls `path` damaged for what readers of torn files raise."""
    try:
        yield
    except (OSError, InputError):
        raise
    except Exception as error:  # pickle and zip readers raise many kinds
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise InputError(f"{path} is damaged: {reason:.200}; {ADVICE}") from error


class Reader(FileSystemReader):
    """Reads the tensors of a checkpoint; raises InputError for a file that is damaged."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.folder = folder

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the metadata, which names files, shapes and dtypes."""
        with damage_as_input_errors(self.folder / METADATA):
            return super().read_metadata(*args, **kwargs)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the planned parts, after comparing the sizes of their files with the metadata."""
        needed: dict[str, int] = {}
        for item in plan.items:
            part = self.storage_data[item.storage_index]
            end = part.offset + part.length
            needed[part.relative_path] = max(end, needed.get(part.relative_path, 0))
        for name, num_bytes in needed.items():
            path = self.folder / name
            size = path.stat().st_size
            if size < num_bytes:
                raise InputError(
                    f"{path} is damaged: it has {size:,} bytes, of {num_bytes:,} or more; {ADVICE}"
                )
        with damage_as_input_errors(self.folder):
            return super().read_data(plan, planner)


class OneByOneReader(Reader):
    """Reads whole tensors one at a time, on one process; reads the metadata only once."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.metadata = self.read_metadata()
        self.set_up_storage_reader(self.metadata, is_coordinator=True)

    def fill(self, name: str, tensor: Tensor) -> None:
        """Read the tensor `name` into `tensor`, which has its shape and dtype."""
        planner = DefaultLoadPlanner()  # what dcp.load does, which takes longer for small tensors
        planner.set_up_planner({name: tensor}, self.metadata, is_coordinator=True)
        self.read_data(planner.create_local_plan(), planner).wait()


@contextmanager
def os_errors_as_input_errors(
    action: str, explain: Callable[[OSError], str] = str
) -> Iterator[None]:
    """Raise an InputError, "<action> (rank 1): <explanation>", for an OSError in the block.

    Works for errors that torch.distributed.checkpoint collected from all ranks; the error of the
    lowest rank is raised. What interrupted this rank, as a signal does, is raised as it was, and
    what interrupted another one as a RankError.
    """
    try:
        yield
    except CheckpointException as failure:
        number = min(failure.failures)
        error, own = failure.failures[number][0], failure.failures.get(rank())
        if own is not None and not isinstance(own[0], Exception):
            raise own[0] from None
        if not isinstance(error, Exception):
            raise RankError(f"rank {number}: {str(error) or type(error).__name__}") from None
        if isinstance(error, InputError):
            raise error from failure
        if not isinstance(error, OSError):
            raise
        raise InputError(f"{action} (rank {number}): {explain(error)}") from failure
    except OSError as error:
        raise InputError(f"{action}: {explain(error)}") from error


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Ignore torch's warnings about a single process, which is a normal case here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        warnings.filterwarnings("ignore", message=".*assuming the intent is to")
        yield


@contextmanager
def _saving() -> Iterator[None]:
    """As `_without_warnings`, and without CRC-32 in the files, which no reader checks.

    It costs several times as much as copying the tensors.
    """
    before = get_crc32_options()
    set_crc32_options(False)
    try:
        with _without_warnings():
            yield
    finally:
        set_crc32_options(before)


class _Writer(FileSystemWriter):
    """Raises the OSError that torch.save hides behind a RuntimeError.

    Equal tensors give equal files, also in another folder: the metadata says nothing about them.
    """

    def storage_meta(self) -> StorageMeta:
        return StorageMeta()

    def write_data(self, plan: Any, planner: Any) -> Any:
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            if isinstance(error.__context__, OSError):
                raise error.__context__ from error
            raise


class _MemoryWriter(_Writer):
    """Writes its files to memory."""

    def __init__(self, files: MemoryFiles) -> None:
        super().__init__(Path(), sync_files=False)
        self.fs = _MemoryFileSystem(files)


class _MemoryFileSystem(FileSystem):
    """What a writer of torch.distributed.checkpoint does with files, done with `MemoryFiles`."""

    def __init__(self, files: MemoryFiles) -> None:
        self._files = files

    @contextmanager
    def create_stream(self, path: Path, mode: str) -> Iterator[io.BufferedWriter]:
        # torch.save makes dozens of small writes for each tensor.
        with io.BufferedWriter(self._files.create(path.name)) as file:
            yield file

    def rename(self, path: Path, new_path: Path) -> None:
        self._files.rename(path.name, new_path.name)

    def mkdir(self, path: Path) -> None:
        pass  # there are no folders

    def exists(self, path: Path) -> bool:
        return path.name in self._files.extents


class _ReadWhenWritten(DefaultSavePlanner):
    """Plans a checkpoint from shapes, and reads each tensor when it is written."""

    def __init__(self, read: Callable[[str], Tensor]) -> None:
        super().__init__()
        self.read = read

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self.read(index.fqn)
