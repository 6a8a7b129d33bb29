"""Files that other programs pickled, read so that no code in them runs.

torch.load's weights_only refuses all classes but torch's own. Those that programs of this field put
beside their tensors, such as enumerations in Megatron's arguments, are read as inert stand-ins.
"""

import io
import pickle
from argparse import Namespace
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from zeropp.checkpoint import METADATA
from zeropp.errors import InputError, first_few
from zeropp.settings import read_toml

NAMESPACE = "argparse.Namespace"


class UnloadedObject:
    """An object of a class that is not loaded: it holds what it was made of, and does nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __hash__(self) -> int:
        return id(self)


def load_pickle(path: Path, content: io.BytesIO | None = None) -> Any:
    """Return what torch.save wrote to `path`, its tensors mapped into memory on the CPU.

    With `content`, which is a part of that file, tensors are in memory. Raises InputError for a
    file that is damaged, or names other functions or classes.
    """
    source = content or path
    try:
        names = get_unsafe_globals_in_checkpoint(source)
    except (RuntimeError, ValueError, EOFError, pickle.UnpicklingError, OSError) as error:
        raise _damaged(path, error) from error
    unknown = [name for name in names if name != NAMESPACE and not _is_inert(name)]
    if unknown:
        raise InputError(
            f"{path}: is not read, because unpickling it would call {first_few(unknown)}, which no "
            "checkpoint needs and which could run any program; if you trust it, save its tensors "
            "anew where it was written"
        )
    allowed = [(Namespace if name == NAMESPACE else UnloadedObject, name) for name in names]
    try:
        if content is not None:
            content.seek(0)
        with safe_globals(allowed):
            return torch.load(source, map_location="cpu", weights_only=True, mmap=content is None)
    except (RuntimeError, ValueError, EOFError, pickle.UnpicklingError, OSError) as error:
        raise _damaged(path, error) from error


def load_metadata(folder: Path) -> Metadata:
    """Return the `.metadata` of torch.distributed.checkpoint in `folder`, with only its classes.

    Raises InputError for a file that is damaged, or names other functions or classes.
    """
    path = folder / METADATA
    try:
        with path.open("rb") as file:
            metadata = _MetadataUnpickler(file, path).load()
    except InputError:
        raise
    except Exception as error:  # a pickle that is cut short raises many kinds
        raise _damaged(path, error) from error
    if not isinstance(metadata, Metadata):
        raise InputError(f"{path}: holds a {type(metadata).__name__} instead of the metadata")
    return metadata


class _MetadataUnpickler(pickle.Unpickler):
    def __init__(self, file: Any, path: Path) -> None:
        super().__init__(file)
        self._path = path

    def find_class(self, module: str, name: str) -> Any:
        """Return a class of the metadata; raises InputError for any other."""
        full = f"{module}.{name}"
        if full.startswith("megatron."):
            return UnloadedObject
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if full in _table()["metadata"] or is_dtype:
            return super().find_class(module, name)
        raise InputError(
            f"{self._path}: is not read, because unpickling it would call {full}, which no "
            "metadata needs and which could run any program"
        )


def _is_inert(name: str) -> bool:
    return any(name == prefix or name.startswith(prefix) for prefix in _table()["inert"])


def _damaged(path: Path, error: Exception) -> InputError:
    reason = str(error).partition("\n")[0] or type(error).__name__
    return InputError(f"{path} is damaged, or not a file of torch.save: {reason:.200}")


@cache
def _table() -> Mapping[str, list[str]]:
    """Return the contents of `pickles.toml`."""
    return read_toml(__package__, "pickles.toml")
