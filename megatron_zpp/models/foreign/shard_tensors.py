"""Tensors in another program's files of torch.distributed.checkpoint, whole or one row of them."""

import math
from pathlib import Path

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

from megatron_zpp.models.foreign.pickles import load_metadata
from megatron_zpp.models.foreign.tensor_files import LazyTensor
from zeropp.checkpoint.shard_files import Reader
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

    def whole(self, name: str) -> LazyTensor:
        """Return a tensor."""
        entry = self._tensors()[name]
        return self._part(name, torch.Size([0] * len(entry.size)), entry.size)

    def row(self, name: str, index: int) -> LazyTensor:
        """Return the part of a tensor at `index` of its first dim, without that dim."""
        size = self._tensors()[name].size
        offsets = torch.Size([index] + [0] * (len(size) - 1))
        part = self._part(name, offsets, torch.Size([1, *size[1:]]))
        return LazyTensor(part.fact[0], lambda: part.read()[0])

    def _tensors(self) -> dict[str, TensorStorageMetadata]:
        entries = self._metadata.state_dict_metadata.items()
        return {name: each for name, each in entries if isinstance(each, TensorStorageMetadata)}

    def _part(self, name: str, offsets: torch.Size, sizes: torch.Size) -> LazyTensor:
        dtype = self._tensors()[name].properties.dtype
        chunk = ChunkStorageMetadata(offsets=offsets, sizes=sizes)
        fact = torch.empty(sizes, dtype=dtype, device="meta")
        return LazyTensor(fact, lambda: self._read(name, chunk, dtype))

    def _read(self, name: str, chunk: ChunkStorageMetadata, dtype: torch.dtype) -> Tensor:
        entry = self._tensors()[name]
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
