"""`deepspeed.utils.zero_to_fp32`: the whole fp32 weights of an engine's checkpoint.

    python zero_to_fp32.py CHECKPOINT_FOLDER OUTPUT_FOLDER     the script beside a checkpoint

One process reads the shards of any number of ranks, without a process group. Only DeepSpeed's names
are here: its own checkpoints have another format, which its own script reads.
"""

import argparse
import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from zeropp.atomic import write_atomically
from zeropp.checkpoint.engine_checkpoint import find, read_state
from zeropp.checkpoint.gathered_weights import write_weights
from zeropp.checkpoint.rank_values import without_rank
from zeropp.checkpoint.shard_files import OneByOneReader, os_errors_as_input_errors, saved_tensors
from zeropp.checkpoint.state_tensors import MODEL
from zeropp.errors import InputError

UNITS = MappingProxyType({"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12})
SCRIPT_NAME = "zero_to_fp32.py"
SCRIPT = '''\
#!/usr/bin/env python
"""Writes the whole fp32 weights of this folder's checkpoint: zero_to_fp32.py . OUTPUT_FOLDER"""

from zeropp.deepspeed.utils.zero_to_fp32 import main

if __name__ == "__main__":
    main()
'''


@dataclass(frozen=True, kw_only=True)
class SavedWeight:
    """A tensor in a checkpoint: `contiguous()` reads it, floats as fp32."""

    name: str
    saved: Tensor = field(repr=False)  # on the meta device, as it was saved
    reader: OneByOneReader = field(repr=False)

    @property
    def shape(self) -> torch.Size:
        return self.saved.shape

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.saved.is_floating_point() else self.saved.dtype

    @property
    def nbytes(self) -> int:
        return self.saved.numel() * self.dtype.itemsize

    def contiguous(self) -> Tensor:
        """Return the whole tensor, on the CPU."""
        values = torch.empty(self.shape, dtype=self.saved.dtype)
        self.reader.fill(MODEL + self.name, values)
        return values.to(self.dtype)


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: Path | str,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
    lazy_mode: bool = False,
) -> dict[str, Any]:
    """Return the model's state dict with whole tensors on the CPU, floats as fp32.

    `checkpoint_dir` is the folder given to `save_checkpoint`, `tag` the checkpoint in it, by
    default the one that `latest` names. Tied weights are one tensor. With `lazy_mode` the values
    are `SavedWeight`s, each of which is read by its `contiguous()`. Raises InputError if there is
    no such checkpoint, for one of another program, and for one without the frozen weights that are
    asked for.
    """
    weights = _saved_weights(Path(checkpoint_dir), tag, exclude_frozen_parameters)
    return weights if lazy_mode else _read(weights)


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: Path | str,
    output_dir: Path | str,
    max_shard_size: int | str | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Write the weights to `output_dir`, as Hugging Face names files: one, or several and an index.

    Files have at most `max_shard_size` bytes ("5GB", a number, None for one file) unless a tensor
    is larger, and memory holds one file at a time. `safe_serialization` writes safetensors, which
    hold tied weights once, under their first name. Raises InputError as
    `get_fp32_state_dict_from_zero_checkpoint` does, and if a file cannot be written.
    """
    weights = _saved_weights(Path(checkpoint_dir), tag, exclude_frozen_parameters)
    stem, suffix = ("model", "safetensors") if safe_serialization else ("pytorch_model", "bin")
    if safe_serialization:
        weights = _once(weights)
    parts = _parts(weights, _num_bytes(max_shard_size))
    output = Path(output_dir)
    files: dict[str, str] = {}
    with os_errors_as_input_errors(f"cannot write to {output}"):
        output.mkdir(parents=True, exist_ok=True)
        for number, part in enumerate(parts, 1):
            of = f"-{number:05d}-of-{len(parts):05d}" if len(parts) > 1 else ""
            path = output / f"{stem}{of}.{suffix}"
            files |= dict.fromkeys(part, path.name)
            write_weights(path, _read(part))
        if len(parts) > 1:
            total = sum(weight.nbytes for weight in _once(weights).values())
            index = {"metadata": {"total_size": total}, "weight_map": files}
            name = f"{stem}.{suffix}.index.json"
            write_atomically(output / name, json.dumps(index, indent=2) + "\n")


def load_state_dict_from_zero_checkpoint(
    model: nn.Module, checkpoint_dir: Path | str, tag: str | None = None
) -> nn.Module:
    """Load the fp32 weights into `model`, which is moved to the CPU, and return it.

    `model` must not be an engine's: build it anew. Raises InputError as
    `get_fp32_state_dict_from_zero_checkpoint` does, and unless the names are the same.
    """
    weights = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag)
    model = model.cpu()
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        raise InputError(f"{checkpoint_dir} is of another model: {error}") from error
    return model


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command `zero_to_fp32.py`."""
    parser = argparse.ArgumentParser(
        prog=SCRIPT_NAME, description="Write the whole fp32 weights of a checkpoint."
    )
    parser.add_argument("checkpoint_dir", help="the folder that save_checkpoint wrote to")
    parser.add_argument("output_dir", help="the folder for the files of weights")
    parser.add_argument("--max_shard_size", default="5GB", help="of one file (default: 5GB)")
    parser.add_argument("--safe_serialization", action="store_true", help="write safetensors")
    parser.add_argument("-t", "--tag", help="the checkpoint (default: what `latest` names)")
    parser.add_argument("--exclude_frozen_parameters", action="store_true")
    parser.add_argument("-d", "--debug", action="store_true", help="show errors with a traceback")
    options = vars(parser.parse_args(arguments))
    debug = options.pop("debug")
    try:
        convert_zero_checkpoint_to_fp32_state_dict(**options)
    except InputError as error:
        if debug:
            raise
        sys.exit(f"{SCRIPT_NAME}: {error}")


def _saved_weights(folder: Path, tag: str | None, exclude_frozen: bool) -> dict[str, SavedWeight]:
    """Return the weights and buffers of a checkpoint by name; tied names share one object."""
    with os_errors_as_input_errors(f"cannot read a checkpoint from {folder}"):
        path = find(folder, tag)
        state, saved = read_state(path), saved_tensors(path)
        reader = OneByOneReader(path)
    left_out = [] if exclude_frozen else state.get("stored_elsewhere", [])
    if left_out:
        raise InputError(
            f"{path} does not hold the frozen weights ({left_out[0]}, ...), which were stored "
            "quantized or excluded: take those from where they came from, and the others with "
            "exclude_frozen_parameters"
        )
    frozen = set(state.get("frozen", ())) if exclude_frozen else set()
    weights = {}
    for full_name, tensor in saved.items():
        name = full_name.removeprefix(MODEL)
        is_weight = full_name.startswith(MODEL) and without_rank(full_name) == full_name
        if is_weight and name not in frozen:
            weights[name] = SavedWeight(name=name, saved=tensor, reader=reader)
    for name, first in state.get("tied", {}).items():
        if first in weights:
            weights[name] = weights[first]
    return weights


def _read(weights: Mapping[str, SavedWeight]) -> dict[str, Tensor]:
    values: dict[str, Tensor] = {}
    for name, weight in weights.items():
        if weight.name not in values:
            values[weight.name] = weight.contiguous()
        values[name] = values[weight.name]
    return {name: values[name] for name in weights}


def _once(weights: Mapping[str, SavedWeight]) -> dict[str, SavedWeight]:
    """Return tied weights under their first name only."""
    return {weight.name: weight for weight in weights.values()}


def _parts(weights: Mapping[str, SavedWeight], most: int) -> list[dict[str, SavedWeight]]:
    """Divide the weights into files of at most `most` bytes; tied ones are in the same file."""
    parts: list[dict[str, SavedWeight]] = [{}]
    size = 0
    for weight in _once(weights).values():
        if parts[-1] and size + weight.nbytes > most:
            parts.append({})
            size = 0
        parts[-1] |= {name: each for name, each in weights.items() if each is weight}
        size += weight.nbytes
    return parts


def _num_bytes(size: int | str | None) -> int:
    if size is None:
        return sys.maxsize
    match = re.fullmatch(r"(\d+)\s*([KMGT]?)B?", str(size).strip().upper())
    if not match or not int(match[1]):
        raise InputError(f'max_shard_size = {size!r}: expected a size such as "5GB" or "500MB"')
    return int(match[1]) * UNITS[match[2]]
