"""Which program wrote a checkpoint, by the names of its files; only small text files are read.

A checkpoint of another program is not damaged, but has another format. The files beside the tensors
distinguish it from a damaged checkpoint of ours.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path

from zeropp.errors import InputError
from zeropp.settings.no_effect_tables import read_toml


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
    files: Sequence[str]
    export: str
    ours: bool = False


def _read_formats() -> Iterator[CheckpointFormat]:
    table = read_toml(__package__, "checkpoint_formats.toml")
    for row in table["formats"]:
        kind, export = FormatKind[row.pop("kind")], row.pop("export").format(**table["programs"])
        yield CheckpointFormat(kind=kind, export=export, **row)


FORMATS = tuple(_read_formats())
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
