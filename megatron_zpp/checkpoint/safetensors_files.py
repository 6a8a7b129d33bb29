"""Write safetensors files one tensor at a time, so that memory never holds the whole model.

A file is a header with the offset of each tensor, which follows from the shapes, then the tensors
one after another. If one file would be too large, the tensors are divided among several, with the
index that Hugging Face's loaders read. Format: https://huggingface.co/docs/safetensors
"""

import json
import re
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO

import torch
from torch import Tensor

from zeropp.atomic import write_atomically
from zeropp.errors import InputError

SUFFIX = ".safetensors"
INDEX = ".index.json"  # appended to the name that a single file would have
DTYPES = MappingProxyType({"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16})
DTYPE_NAMES = MappingProxyType(
    {  # in the header of a file
        torch.float64: "F64",
        torch.float32: "F32",
        torch.bfloat16: "BF16",
        torch.float16: "F16",
        torch.int64: "I64",
        torch.int32: "I32",
        torch.int16: "I16",
        torch.int8: "I8",
        torch.uint8: "U8",
        torch.bool: "BOOL",
    }
)
UNITS = MappingProxyType(
    {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
)
ALIGNMENT = 8  # of the first tensor in the file, in bytes
PROGRESS_SECONDS = 2


@dataclass(frozen=True, kw_only=True)
class Item:
    """A tensor to be written: its name, shape and dtype in the file, and how to read its values."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]

    @property
    def num_bytes(self) -> int:
        """Size in the file."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def write_safetensors(
    output: Path, items: Sequence[Item], metadata: Mapping[str, str], max_bytes: int | None = None
) -> list[Path]:
    """Write the tensors to `output`, or to several files of at most `max_bytes` and their index.

    Each file is complete or absent. Returns their paths, the index last. Raises InputError if there
    is too little disk space, and for a number too large for fp16.
    """
    total = sum(item.num_bytes for item in items)
    output.parent.mkdir(parents=True, exist_ok=True)
    _check_space(output.parent, total)
    shards = _split(items, max_bytes)
    paths = [_shard_path(output, number, len(shards)) for number in range(len(shards))]
    progress = _Progress(len(items), total)
    for path, shard in zip(paths, shards, strict=True):
        write_atomically(path, lambda file, s=shard: _write(file, s, metadata, progress))
    if len(shards) > 1:
        weight_map = {
            item.name: path.name
            for path, shard in zip(paths, shards, strict=True)
            for item in shard
        }
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        paths.append(output.with_name(output.name + INDEX))
        write_atomically(paths[-1], text)
    return paths


def num_bytes(text: str | None, flag: str) -> int | None:
    """Parse a size such as 5GB or 500MiB into bytes; raises InputError that names `flag`."""
    if text is None:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]I?B)?", text.strip().upper())
    size = int(float(match[1]) * UNITS[match[2] or ""]) if match else 0
    if size < 1:
        raise InputError(f"{flag} {text}: expected a size such as 5GB, 500MiB or 1000000")
    return size


class _Progress:
    """Prints to standard error every few seconds how much has been written."""

    def __init__(self, num_tensors: int, total_bytes: int) -> None:
        self.num_tensors, self.total_bytes = num_tensors, total_bytes
        self.tensors = self.num_bytes = 0
        self.last_print = time.monotonic()

    def add(self, item: Item) -> None:
        self.tensors += 1
        self.num_bytes += item.num_bytes
        if time.monotonic() - self.last_print > PROGRESS_SECONDS:
            self.last_print = time.monotonic()
            print(
                f"{self.tensors} of {self.num_tensors} tensors, {self.num_bytes / 1e9:.2f} of "
                f"{self.total_bytes / 1e9:.2f} GB",
                file=sys.stderr,
                flush=True,
            )


def _check_space(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise InputError(f"{folder}: {needed:,} bytes are needed and {free:,} are free")


def _split(items: Sequence[Item], max_bytes: int | None) -> list[list[Item]]:
    """Fill one file after another; a tensor larger than `max_bytes` gets a file of its own."""
    shards: list[list[Item]] = [[]]
    used = 0
    for item in items:
        if max_bytes is not None and shards[-1] and used + item.num_bytes > max_bytes:
            shards.append([])
            used = 0
        shards[-1].append(item)
        used += item.num_bytes
    return shards


def _shard_path(output: Path, number: int, count: int) -> Path:
    if count == 1:
        return output
    return output.with_name(f"{output.stem}-{number + 1:05d}-of-{count:05d}{SUFFIX}")


def _write(
    file: BinaryIO, items: Sequence[Item], metadata: Mapping[str, str], progress: _Progress
) -> None:
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    offset = 0
    for item in items:
        end = offset + item.num_bytes
        header[item.name] = {
            "dtype": DTYPE_NAMES[item.dtype],
            "shape": list(item.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    file.write(len(text).to_bytes(8, "little"))
    file.write(text)
    for item in items:
        file.write(_content(item))
        progress.add(item)


def _content(item: Item) -> memoryview:
    """Read a tensor and return its bytes in the dtype of the file."""
    tensor = item.read()
    assert tensor.shape == item.shape, f"{item.name} has shape {list(tensor.shape)}"
    converted = tensor.to(item.dtype)
    if item.dtype == torch.float16 and bool((converted.isinf() & tensor.isfinite()).any()):
        raise InputError(
            f"{item.name} holds {tensor[tensor.isfinite()].abs().max():g}, more than fp16 can: "
            "use --dtype bf16"
        )
    return memoryview(converted.reshape(-1).view(torch.uint8).numpy())
