"""Write a checkpoint's weights as one safetensors file, in fp32 or 16 bit.

    python tools/consolidate.py --load checkpoints --output model.safetensors --dtype bf16

Tensors are read, converted and written one at a time, so that memory never holds the whole model.
With --max-shard-size they are divided among several files, with the index that Hugging Face's
loaders read.
"""

import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [] if str(ROOT) in sys.path else [str(ROOT)]  # also where nothing is installed

from megatron_zpp.checkpoint.checkpoint_weights import (  # noqa: E402
    CheckpointWeights,
    find_checkpoint,
)
from megatron_zpp.checkpoint.safetensors_files import (  # noqa: E402
    DTYPES,
    SUFFIX,
    Item,
    num_bytes,
    write_safetensors,
)
from megatron_zpp.checkpoint.training_state import read_state  # noqa: E402
from megatron_zpp.settings.command_line import HELP, help_text, read, vocabulary  # noqa: E402
from megatron_zpp.settings.flag import Section, flag  # noqa: E402
from zeropp.errors import InputError  # noqa: E402

USAGE = "usage: python tools/consolidate.py --load FOLDER --output FILE.safetensors [flags]"


@dataclass(frozen=True, kw_only=True)
class ConsolidateConfig(Section):
    """What to read and what to write"""

    load: str | None = flag(None, "folder of checkpoints, or one checkpoint's folder in it")
    output: str | None = flag(None, "file to write, or a folder for model.safetensors")
    dtype: str = flag("fp32", "type of the numbers written", choices=tuple(DTYPES))
    max_shard_size: str | None = flag(None, "most bytes in a file, as 5GB or 500MiB (default: one)")


def main(argv: Sequence[str]) -> int:
    """Run the tool; returns the exit status, after a line `error: ...` where it is not 0."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    if any(word in HELP for word in argv):
        print(help_text(USAGE, (ConsolidateConfig,)))
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
    path, output = find_checkpoint(Path(config.load)), Path(config.output)
    if output.suffix != SUFFIX:
        output = output / f"model{SUFFIX}"
    items = _items(CheckpointWeights(path), config.dtype)
    about = {"format": "pt", "iteration": str(read_state(path).iteration)}
    most = num_bytes(config.max_shard_size, "--max-shard-size")
    paths = write_safetensors(output, items, about, most)
    total = sum(item.num_bytes for item in items)
    print(f"{path}: {len(items)} tensors, {total:,} bytes in {config.dtype}, in {paths[-1]}")
    return paths


def _config(argv: Sequence[str]) -> ConsolidateConfig:
    typed = read(argv, vocabulary((ConsolidateConfig,)))
    values = {entry.name: typed[entry.name].value for entry in fields(ConsolidateConfig)
              if entry.name in typed}
    for name in ("load", "output"):
        if name not in values:
            raise InputError(f"--{name} is missing\n{USAGE}")
    config = ConsolidateConfig(**values)
    config.check()
    return config


def _items(weights: CheckpointWeights, dtype: str) -> list[Item]:
    return [
        Item(
            name=name,
            shape=tuple(facts.shape),
            dtype=DTYPES[dtype] if facts.dtype.is_floating_point else facts.dtype,
            read=lambda name=name: weights.read(name),
        )
        for name, facts in weights.facts().items()
    ]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
