"""Tensors in another program's files of torch.distributed.checkpoint, whole or parts of them."""

import io
import math
from collections.abc import KeysView
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from megatron_zpp.interchange.foreign.pickles import load_metadata, load_pickle
from megatron_zpp.interchange.foreign.tensor_files import LazyTensor
from zeropp.checkpoint import Reader
from zeropp.errors import InputError, first_few


class ShardTensors:
    """The tensors in a folder; raises InputError if files that its metadata names are missing."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._metadata = load_metadata(folder)
        self._reader = _Reader(folder, self._metadata)
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)
        files = {info.relative_path for info in self._metadata.storage_data.values()}
        missing = sorted(name for name in files if not (folder / name).is_file())
        if missing:
            raise InputError(
                f"{folder}: {first_few(missing)}: named in its metadata and missing; copy the "
                "whole folder, with the files of all ranks"
            )

    def shapes(self) -> dict[str, torch.Size]:
        """Return the shape of every tensor by name."""
        return {name: entry.size for name, entry in self._tensors().items()}

    def shape(self, name: str) -> torch.Size:
        """Return the shape of a tensor."""
        return self._metadata.state_dict_metadata[name].size

    def names(self) -> KeysView[str]:
        """Return the names of all entries, also of pickled objects."""
        return self._metadata.state_dict_metadata.keys()

    def whole(self, name: str) -> LazyTensor:
        """Return a tensor."""
        size = self.shape(name)
        return self._part(name, torch.Size([0] * len(size)), size)

    def row(self, name: str, index: int) -> LazyTensor:
        """Return the part of a tensor at `index` of its first dim, without that dim."""
        size = self.shape(name)
        offsets = torch.Size([index] + [0] * (len(size) - 1))
        return self._part(name, offsets, torch.Size([1, *size[1:]])).view(size[1:])

    def flat_part(self, name: str, start: int, end: int) -> LazyTensor:
        """Return the numbers `start` to `end` of a vector."""
        return self._part(name, torch.Size([start]), torch.Size([end - start]))

    def chunk_ends(self, name: str) -> set[int]:
        """Return where the chunks of a vector begin and end."""
        chunks = self._metadata.state_dict_metadata[name].chunks
        starts = {chunk.offsets[0] for chunk in chunks}
        return starts | {chunk.offsets[0] + chunk.sizes[0] for chunk in chunks}

    def pickled(self, name: str) -> Any:
        """Return an object that megatron-core pickled, in a list.

        Raises InputError if it is missing or damaged.
        """
        info = self._metadata.storage_data.get(MetadataIndex(name))
        if info is None:
            raise InputError(f"{self.folder}: {name}: missing in its metadata")
        path = self.folder / info.relative_path
        with path.open("rb") as file:
            file.seek(info.offset)
            (content,) = load_pickle(path, io.BytesIO(file.read(info.length)))
        return content

    def _tensors(self) -> dict[str, TensorStorageMetadata]:
        entries = self._metadata.state_dict_metadata.items()
        return {name: each for name, each in entries if isinstance(each, TensorStorageMetadata)}

    def _part(self, name: str, offsets: torch.Size, sizes: torch.Size) -> LazyTensor:
        dtype = self._metadata.state_dict_metadata[name].properties.dtype
        chunk = ChunkStorageMetadata(offsets=offsets, sizes=sizes)
        fact = torch.empty(sizes, dtype=dtype, device="meta")
        return LazyTensor(fact, lambda: self._read(name, chunk, dtype))

    def _read(self, name: str, chunk: ChunkStorageMetadata, dtype: torch.dtype) -> Tensor:
        entry = self._metadata.state_dict_metadata[name]
        items = create_read_items_for_chunk_list(name, entry, [chunk])
        covered = sum(math.prod(item.lengths) for item in items)
        if covered != chunk.sizes.numel():
            raise InputError(
                f"{self.folder}: of {name} {covered:,} of {chunk.sizes.numel():,} numbers are there"
            )
        tensor = torch.empty(chunk.sizes, dtype=dtype)
        planner = _OneTensor(tensor)
        self._reader.read_data(LoadPlan(items), planner).wait()
        return tensor


class _Reader(Reader):
    def __init__(self, folder: Path, metadata: Metadata) -> None:
        super().__init__(folder)
        self._metadata = metadata

    def read_metadata(self, *args: object, **kwargs: object) -> Metadata:
        """Return what was read without running code."""
        return self._metadata


class _OneTensor(DefaultLoadPlanner):
    """Puts everything that is read into one tensor."""

    def __init__(self, tensor: Tensor) -> None:
        super().__init__()
        self._tensor = tensor

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """Return the tensor."""
        return self._tensor
