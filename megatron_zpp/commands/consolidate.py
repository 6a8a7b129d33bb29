"""Writes a checkpoint's weights to one safetensors file, without the optimizer.

    megatron-zpp consolidate --load checkpoints --output model.safetensors --dtype bf16

Tensors are read, converted and written one at a time, so that memory holds one tensor and never the
model. `--max-shard-size` spreads them over several files and writes the index that Hugging Face's
loaders read.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_zpp.checkpoint.checkpoint_weights import CheckpointWeights, find_checkpoint
from megatron_zpp.checkpoint.safetensors_files import (
    DTYPES,
    SUFFIX,
    Item,
    num_bytes,
    write_safetensors,
)
from megatron_zpp.checkpoint.training_state import read_state
from megatron_zpp.commands.run_command import run_command
from megatron_zpp.settings.flag import Section, flag

USAGE = "usage: {program} --load FOLDER --output FILE.safetensors [flags]"


@dataclass(frozen=True, kw_only=True)
class ConsolidateConfig(Section):
    """What to read and what to write"""

    load: str | None = flag(
        None, "folder of checkpoints, or the folder of one checkpoint", required=True
    )
    output: str | None = flag(
        None, "file to write, or a folder for model.safetensors", required=True
    )
    dtype: str = flag("fp32", "dtype of the written tensors", choices=tuple(DTYPES))
    max_shard_size: str | None = flag(
        None, "maximum size of a file, for example 5GB or 500MiB (default: a single file)"
    )


def main(argv: Sequence[str], program: str = "megatron-zpp consolidate") -> int:
    """Run the command; return the exit status."""
    return run_command(
        argv,
        USAGE.format(program=program),
        (ConsolidateConfig,),
        consolidate,
        interrupted="stopped; the output is not complete",
    )


def consolidate(config: ConsolidateConfig) -> list[Path]:
    """Write the weights of the newest complete checkpoint; return the files, the index last.

    Raises InputError if there is no complete checkpoint, no space, or a number too large for fp16.
    """
    path, output = find_checkpoint(Path(config.load)), Path(config.output)
    if output.suffix != SUFFIX:
        output = output / f"model{SUFFIX}"
    items = _items(CheckpointWeights(path), config.dtype)
    metadata = {"format": "pt", "iteration": str(read_state(path).iteration)}
    max_bytes = num_bytes(config.max_shard_size, "--max-shard-size")
    paths = write_safetensors(output, items, metadata, max_bytes)
    total = sum(item.num_bytes for item in items)
    print(f"{path}: {len(items)} tensors, {total:,} bytes in {config.dtype}, in {paths[-1]}")
    return paths


def _items(weights: CheckpointWeights, dtype: str) -> list[Item]:
    return [
        Item(
            name=name,
            shape=tuple(tensor.shape),
            dtype=DTYPES[dtype] if tensor.dtype.is_floating_point else tensor.dtype,
            read=lambda name=name: weights.read(name),
        )
        for name, tensor in weights.facts().items()
    ]
