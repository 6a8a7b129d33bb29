"""safetensors files written one tensor at a time: memory holds one tensor, never the model.

Such a file is a header that says where each tensor will lie, then the tensors one after another.
The header follows from the shapes. Where one file would be too large, the tensors are spread over
several, with the index that Hugging Face's loaders read.
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
INDEX = ".index.json"  # after the name that one file would have
DTYPES = MappingProxyType({"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16})
NAMES = MappingProxyType(
    {  # of dtypes in safetensors' header
        torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16",
        torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
        torch.uint8: "U8", torch.bool: "BOOL",
    }
)  # fmt: skip
UNITS = MappingProxyType(
    {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
)
ALIGNMENT = 8  # bytes, of the first tensor
PROGRESS_SECONDS = 2


@dataclass(frozen=True, kw_only=True)
class Item:
    """A tensor to be written: its name, shape and dtype in the file, and how to come by it."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]

    @property
    def num_bytes(self) -> int:
        """Bytes it takes in the file."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def write_safetensors(
    output: Path, items: Sequence[Item], about: Mapping[str, str], most: int | None = None
) -> list[Path]:
    """Write the tensors to `output`, or to several files of at most `most` bytes and their index.

    Each file is there complete or not at all; returns their paths, the index last. Raises
    InputError if there is too little space, or for a number too large for fp16.
    """
    total = sum(item.num_bytes for item in items)
    output.parent.mkdir(parents=True, exist_ok=True)
    _check_space(output.parent, total)
    shards = _split(items, most)
    paths = [_shard_path(output, number, len(shards)) for number in range(len(shards))]
    progress = _Progress(len(items), total)
    for path, shard in zip(paths, shards, strict=True):
        write_atomically(path, lambda file, s=shard: _write(file, s, about, progress))
    if len(shards) > 1:
        weight_map = {
            item.name: path.name
            for path, shard in zip(paths, shards, strict=True)
            for item in shard
        }
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        paths.append(output.with_name(output.name + INDEX))
        write_atomically(paths[-1], lambda file: file.write(text.encode()))
    return paths


def num_bytes(text: str | None, flag: str) -> int | None:
    """The bytes that a size such as 5GB or 500MiB means; InputError names `flag`."""
    if text is None:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]I?B)?", text.strip().upper())
    size = int(float(match[1]) * UNITS[match[2] or ""]) if match else 0
    if size < 1:
        raise InputError(f"{flag} {text}: expected a size such as 5GB, 500MiB or 1000000")
    return size


class _Progress:
    """Says on standard error every few seconds how much is written."""

    def __init__(self, num_tensors: int, total_bytes: int) -> None:
        self.num_tensors, self.total_bytes = num_tensors, total_bytes
        self.tensors = self.num_bytes = 0
        self.said = time.monotonic()

    def add(self, item: Item) -> None:
        self.tensors += 1
        self.num_bytes += item.num_bytes
        if time.monotonic() - self.said > PROGRESS_SECONDS:
            self.said = time.monotonic()
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


def _split(items: Sequence[Item], most: int | None) -> list[list[Item]]:
    """Fill one file after another; a tensor larger than `most` bytes gets a file of its own."""
    shards: list[list[Item]] = [[]]
    used = 0
    for item in items:
        if most is not None and shards[-1] and used + item.num_bytes > most:
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
    file: BinaryIO, items: Sequence[Item], about: Mapping[str, str], progress: _Progress
) -> None:
    header: dict[str, Any] = {"__metadata__": dict(about)}
    offset = 0
    for item in items:
        end = offset + item.num_bytes
        header[item.name] = {
            "dtype": NAMES[item.dtype], "shape": list(item.shape), "data_offsets": [offset, end],
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
    """Return a tensor's bytes in the wanted dtype."""
    saved = item.read()
    assert saved.shape == item.shape, f"{item.name} has shape {list(saved.shape)}"
    written = saved.to(item.dtype)
    if item.dtype == torch.float16 and bool((written.isinf() & saved.isfinite()).any()):
        raise InputError(
            f"{item.name} holds {saved[saved.isfinite()].abs().max():g}, more than fp16 can: "
            "use --dtype bf16"
        )
    return memoryview(written.reshape(-1).view(torch.uint8).numpy())
