"""The weights of a checkpoint, whole, read one tensor at a time on one process."""

import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from megatron_zpp.checkpoint import checkpoint
from zeropp.checkpoint.state_tensors import MODEL
from zeropp.errors import InputError


def find_checkpoint(folder: Path, flag: str = "--load") -> Path:
    """The newest complete checkpoint in `folder`, or `folder` if it is one; InputError if none."""
    if re.fullmatch(r"iter_\d+", folder.name):
        if problem := checkpoint.damage(folder):
            raise InputError(f"{flag} {folder}: {problem}")
        return folder
    path = checkpoint.choose(folder)
    if path is None:
        raise InputError(f"{flag} {folder}: there is no checkpoint (iter_0000100) in it")
    return path


class CheckpointWeights:
    """The model's tensors of a checkpoint, by the names of its parameters and buffers.

    `keep` says by its name which of them to show.
    """

    def __init__(self, path: Path, keep: Callable[[str], bool] = lambda name: True) -> None:
        self._reader = _Reader(path)
        self._facts = {
            key.removeprefix(MODEL): torch.empty(
                entry.size, dtype=entry.properties.dtype, device="meta"
            )
            for key, entry in self._reader.metadata.state_dict_metadata.items()
            if key.startswith(MODEL)
            and isinstance(entry, TensorStorageMetadata)
            and keep(key.removeprefix(MODEL))
        }

    def facts(self) -> dict[str, Tensor]:
        """Every tensor's shape and dtype by name, as tensors on the meta device."""
        return dict(self._facts)

    def read(self, name: str) -> Tensor:
        """One whole tensor on the CPU, in the dtype in which it was saved."""
        saved = torch.empty_like(self._facts[name], device="cpu")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp.load({MODEL + name: saved}, storage_reader=self._reader, no_dist=True)
        return saved


class _Reader(FileSystemReader):
    """Reads the checkpoint's metadata once, not again for every tensor."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.metadata = super().read_metadata()

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self.metadata
