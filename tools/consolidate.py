"""One safetensors file out of a checkpoint's shards, in fp32 or 16 bit, without the optimizer.

    python tools/consolidate.py --load checkpoints --output model.safetensors --dtype bf16

A safetensors file is a header that says where each tensor will lie, then the tensors one after
another. The header follows from the shapes, so tensors are read, converted and written one at a
time: memory holds one tensor, never the model. With --max-shard-size the tensors are spread over
several files, with the index that Hugging Face's loaders read.
"""

import json
import logging
import re
import shutil
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, BinaryIO

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [] if str(ROOT) in sys.path else [str(ROOT)]  # also where nothing is installed

from megatron_zpp import checkpoint  # noqa: E402
from megatron_zpp.command_line import HELP, help_text, read, vocabulary  # noqa: E402
from megatron_zpp.config.flag import Section, flag  # noqa: E402
from zeropp.atomic import write_atomically  # noqa: E402
from zeropp.errors import InputError  # noqa: E402
from zeropp.named_tensors import MODEL  # noqa: E402

USAGE = "usage: python tools/consolidate.py --load FOLDER --output FILE.safetensors [flags]"
SUFFIX = ".safetensors"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
NAMES = {  # of dtypes in safetensors' header
    torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint8: "U8", torch.bool: "BOOL",
}
UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
ALIGNMENT = 8  # bytes, of the first tensor
PROGRESS_SECONDS = 2


@dataclass(frozen=True, kw_only=True)
class ConsolidateConfig(Section):
    """What to read and what to write"""

    load: str | None = flag(None, "folder of checkpoints, or one checkpoint's folder in it")
    output: str | None = flag(None, "file to write, or a folder for model.safetensors")
    dtype: str = flag("fp32", "type of the numbers written", choices=tuple(DTYPES))
    max_shard_size: str | None = flag(None, "most bytes in a file, as 5GB or 500MiB (default: one)")


@dataclass(frozen=True)
class Item:
    """A tensor to be written: its name in the file, its key in the checkpoint, shape and dtype."""

    name: str
    key: str
    shape: tuple[int, ...]
    saved_dtype: torch.dtype
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes it takes in the file."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def main(argv: Sequence[str]) -> int:
    """Run the tool; returns the exit status, after a line `error: ...` where it is not 0."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    if any(word in HELP for word in argv):
        print(help_text(USAGE, (ConsolidateConfig,), ()))
        return 0
    try:
        consolidate(_config(argv))
    except (InputError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("error: stopped; the output is not complete", file=sys.stderr)
        return 130
    return 0


def consolidate(config: ConsolidateConfig) -> list[Path]:
    """Write the weights of the newest complete checkpoint; returns the files, the index last.

    Raises InputError if there is no complete checkpoint, no space, or a number too large for fp16.
    """
    path, output = _checkpoint(Path(config.load)), Path(config.output)
    if output.suffix != SUFFIX:
        output = output / f"model{SUFFIX}"
    reader = _Reader(path)
    items = _items(reader.metadata, DTYPES[config.dtype])
    total = sum(item.num_bytes for item in items)
    output.parent.mkdir(parents=True, exist_ok=True)
    _check_space(output.parent, total)
    shards = _split(items, _bytes(config.max_shard_size))
    paths = [_shard_path(output, number, len(shards)) for number in range(len(shards))]
    progress = _Progress(len(items), total)
    about = {"format": "pt", "iteration": str(checkpoint.read_state(path).iteration)}
    for file_path, shard in zip(paths, shards, strict=True):
        write_atomically(file_path, lambda file, s=shard: _write(file, s, about, reader, progress))
    if len(shards) > 1:
        weight_map = {
            item.name: file_path.name
            for file_path, shard in zip(paths, shards, strict=True)
            for item in shard
        }
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        paths.append(output.with_name(f"{output.name}.index.json"))
        write_atomically(paths[-1], lambda file: file.write(text.encode()))
    print(f"{path}: {len(items)} tensors, {total:,} bytes in {config.dtype}, in {paths[-1]}")
    return paths


class _Reader(FileSystemReader):
    """Reads the checkpoint's metadata once, not again for every tensor."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.metadata = super().read_metadata()

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self.metadata


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


def _config(argv: Sequence[str]) -> ConsolidateConfig:
    typed = read(argv, vocabulary((ConsolidateConfig,), ()))
    values = {entry.name: typed[entry.name].value for entry in fields(ConsolidateConfig)
              if entry.name in typed}
    for name in ("load", "output"):
        if name not in values:
            raise InputError(f"--{name} is missing\n{USAGE}")
    config = ConsolidateConfig(**values)
    config.check()
    return config


def _checkpoint(folder: Path) -> Path:
    if re.fullmatch(r"iter_\d+", folder.name):
        if problem := checkpoint.damage(folder):
            raise InputError(f"--load {folder}: {problem}")
        return folder
    path = checkpoint.choose(folder)
    if path is None:
        raise InputError(f"--load {folder}: there is no checkpoint (iter_0000100) in it")
    return path


def _items(metadata: Metadata, dtype: torch.dtype) -> list[Item]:
    items = []
    for key, facts in metadata.state_dict_metadata.items():
        if key.startswith(MODEL) and isinstance(facts, TensorStorageMetadata):
            saved = facts.properties.dtype
            wanted = dtype if saved.is_floating_point else saved
            items.append(Item(key.removeprefix(MODEL), key, tuple(facts.size), saved, wanted))
    return items


def _bytes(text: str | None) -> int | None:
    if text is None:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]I?B)?", text.strip().upper())
    size = int(float(match[1]) * UNITS[match[2] or ""]) if match else 0
    if size < 1:
        raise InputError(f"--max-shard-size {text}: expected a size such as 5GB, 500MiB or 1000000")
    return size


def _check_space(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise InputError(f"{folder}: {needed:,} bytes are needed and {free:,} are free")


def _split(items: list[Item], most: int | None) -> list[list[Item]]:
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
    file: BinaryIO, items: list[Item], about: dict[str, str], reader: _Reader, progress: _Progress
) -> None:
    header: dict[str, Any] = {"__metadata__": about}
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
        file.write(_content(item, reader))
        progress.add(item)


def _content(item: Item, reader: _Reader) -> memoryview:
    """Return a tensor's bytes in the wanted dtype."""
    saved = torch.empty(item.shape, dtype=item.saved_dtype)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.load({item.key: saved}, storage_reader=reader, no_dist=True)
    written = saved.to(item.dtype)
    if item.dtype == torch.float16 and bool((written.isinf() & saved.isfinite()).any()):
        raise InputError(
            f"{item.name} holds {saved[saved.isfinite()].abs().max():g}, more than fp16 can: "
            "use --dtype bf16"
        )
    return memoryview(written.reshape(-1).view(torch.uint8).numpy())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
