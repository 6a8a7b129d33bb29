"""Which program wrote a checkpoint, by the names of its files; only small text files are read.

A checkpoint of another program is not damaged, but has another format. The files beside the tensors
distinguish it from a damaged checkpoint of ours.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path

from zeropp.errors import InputError

_BY_BRIDGE = (
    "Megatron Bridge's examples/conversion/convert_checkpoints.py exports it as a Hugging Face "
    "folder"
)
_BY_DEEPSPEED = (
    "Megatron-DeepSpeed's tools/convert_checkpoint/deepspeed_to_transformers.py exports a GPT as a "
    "Hugging Face folder, and DeepSpeed's zero_to_fp32.py, which is in the folder, any model as "
    "one file of weights"
)
_BY_TITAN = (
    "the program that wrote it may export it as a Hugging Face folder: torchtitan has "
    "scripts/checkpoint_conversion/convert_to_hf.py for that"
)


class FormatKind(Enum):
    """The layouts, as readers tell them apart."""

    BRIDGE = auto()
    TORCH_DIST = auto()
    OTHER_CORE = auto()
    MEGATRON_RANKS = auto()
    UNIVERSAL = auto()
    ZERO = auto()
    DEEPSPEED = auto()
    ENGINE = auto()
    OURS = auto()
    SHARDS = auto()
    HUGGING_FACE = auto()


@dataclass(frozen=True, kw_only=True)
class CheckpointFormat:
    """How a program lays out a checkpoint.

    `name` describes it; each pattern in `files` must match a file; `export` says how to convert it
    to a Hugging Face folder ("" if it is one); `ours` marks formats of this project.
    """

    kind: FormatKind
    name: str
    files: tuple[str, ...]
    export: str
    ours: bool = False


# The first whose files are there is the one.
FORMATS = (
    CheckpointFormat(
        kind=FormatKind.BRIDGE,
        name="a checkpoint of Megatron Bridge, in Megatron-LM's torch_dist format",
        files=("run_config.yaml", ".metadata"),
        export=_BY_BRIDGE,
    ),
    CheckpointFormat(
        kind=FormatKind.TORCH_DIST,
        name="a checkpoint of Megatron-LM, in its torch_dist format",
        files=("common.pt", ".metadata"),
        export=_BY_BRIDGE,
    ),
    CheckpointFormat(  # since megatron-core 0.19 without common.pt
        kind=FormatKind.TORCH_DIST,
        name="a checkpoint of Megatron-LM, in its torch_dist format",
        files=(".metadata", "metadata.json", "*.distcp"),
        export=_BY_BRIDGE,
    ),
    CheckpointFormat(
        kind=FormatKind.OTHER_CORE,
        name="a checkpoint of Megatron-LM, in a format of megatron.core.dist_checkpointing",
        files=("common.pt", "metadata.json"),
        export=_BY_BRIDGE,
    ),
    CheckpointFormat(
        kind=FormatKind.MEGATRON_RANKS,
        name="a checkpoint of Megatron-LM, in its legacy format (mp_rank_XX)",
        files=("mp_rank_*/model*_rng.pt",),
        export="Megatron-LM's tools/checkpoint/convert.py brings it to its torch_dist format, and "
        + _BY_BRIDGE,
    ),
    CheckpointFormat(
        kind=FormatKind.UNIVERSAL,
        name="a checkpoint of DeepSpeed, in its universal format",
        files=("zero/*/fp32.pt",),
        export="the checkpoint that ds_to_universal.py made it of can be exported: "
        + _BY_DEEPSPEED,
    ),
    CheckpointFormat(
        kind=FormatKind.ZERO,
        name="a checkpoint of DeepSpeed, sharded by ZeRO",
        files=("*zero_pp_rank_*_states.pt",),
        export=_BY_DEEPSPEED,
    ),
    CheckpointFormat(
        kind=FormatKind.DEEPSPEED,
        name="a checkpoint of DeepSpeed",
        files=("*mp_rank_*_model_states.pt",),
        export=_BY_DEEPSPEED,
    ),
    CheckpointFormat(
        kind=FormatKind.ENGINE,
        name="a checkpoint of an engine of zeropp.initialize",
        files=(".metadata", "state.pt"),
        export="load it with engine.load_checkpoint, whose model may be any",
        ours=True,
    ),
    CheckpointFormat(
        kind=FormatKind.OURS,
        name="a checkpoint of pretrain_gpt.py",
        files=(".metadata", "manifest.json", "state.json"),
        export="load it with --load, or export it with tools/convert_hf.py --to-hf",
        ours=True,
    ),
    CheckpointFormat(
        kind=FormatKind.SHARDS,
        name="a checkpoint of torchtitan, or of another program on torch.distributed.checkpoint",
        files=(".metadata", "*.distcp"),
        export=_BY_TITAN,
    ),
    CheckpointFormat(
        kind=FormatKind.HUGGING_FACE,
        name="a model in Hugging Face's format",
        files=("config.json", "*.safetensors"),
        export="",
    ),
    CheckpointFormat(
        kind=FormatKind.HUGGING_FACE,
        name="a model in Hugging Face's format",
        files=("config.json", "pytorch_model*.bin"),
        export="",
    ),
)
# Folders of checkpoints inside the one that a user names.
_RELEASE = "release"
_CHECKPOINTS = ("iter_*", _RELEASE, "global_step*", "step-*", "checkpoint/step-*", "checkpoint-*")
_POINTERS = ("latest", "latest_universal")
_MEGATRON_POINTER = "latest_checkpointed_iteration.txt"  # a number, or "release"


def format_of(checkpoint: Path) -> CheckpointFormat | None:
    """Return the format of a checkpoint's folder; None if it is unknown."""
    for known in FORMATS:
        if all(any(checkpoint.glob(pattern)) for pattern in known.files):
            return known
    return None


def find_format(folder: Path) -> tuple[Path, CheckpointFormat] | None:
    """Return the checkpoint in `folder`, or `folder` itself, that has a known format, and which."""
    for path in _places(folder):
        found = format_of(path)
        if found is not None:
            return path, found
    return None


def _places(folder: Path) -> Iterator[Path]:
    """Yield where a checkpoint may be: `folder`, what its pointers name, the newest in it first."""
    yield folder
    for pointer in _POINTERS:
        if (folder / pointer).is_file():
            name = (folder / pointer).read_text(errors="replace").strip()
            if name and Path(name).name == name:
                yield folder / name
    megatron = folder / _MEGATRON_POINTER
    if megatron.is_file():
        text = megatron.read_text(errors="replace").strip()
        yield folder / (f"iter_{int(text):07d}" if re.fullmatch(r"[0-9]{1,9}", text) else _RELEASE)
    for pattern in _CHECKPOINTS:
        yield from sorted(folder.glob(pattern), reverse=True)


def foreign_error(path: Path, found: CheckpointFormat, named_by: str, to_import: str) -> InputError:
    """Return the error for a checkpoint in a format that the loader does not read.

    `named_by` is the flag or the call that names it, `to_import` what reads a Hugging Face folder.
    """
    advice = found.export if found.ours else "; ".join(filter(None, (found.export, to_import)))
    return InputError(
        f"{named_by}: {path} is {found.name}, which cannot be loaded here as it is: {advice}"
    )
