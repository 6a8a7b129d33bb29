"""The folder that --save and --load name: a checkpoint for each iteration, in Megatron's layout.

    SAVE/iter_0000100/                       shards, state.json and, last, manifest.json
    SAVE/latest_checkpointed_iteration.txt   100
    SAVE/node_1/                             the same of the second independent replica

Nothing here needs tensors or ranks.
"""

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_zpp.checkpoint.manifest import MANIFEST, DamagedError, read_manifest, write_manifest
from megatron_zpp.checkpoint.training_state import STATE
from zeropp.atomic import write_atomically
from zeropp.checkpoint import (
    CheckpointFolder,
    FileEntry,
    FolderLock,
    FormatKind,
    Note,
    file_entry,
    find_format,
    foreign_error,
    format_of,
)
from zeropp.errors import InputError

IMPORT = "tools/convert_hf.py --from-hf FOLDER --save OTHER imports a Hugging Face folder"
# What tools/convert_hf.py --from-checkpoint reads.
IMPORTED_KINDS = (
    FormatKind.TORCH_DIST,
    FormatKind.MEGATRON_RANKS,
    FormatKind.ZERO,
    FormatKind.DEEPSPEED,
    FormatKind.UNIVERSAL,
    FormatKind.SHARDS,
)
POINTER = "latest_checkpointed_iteration.txt"
_NAME = re.compile(r"iter_(\d{7,})|\.iter_(\d{7,})\.replaced")


def checkpoint_folder(folder: Path, lock: FolderLock | None = None) -> CheckpointFolder:
    """How checkpoints are written to `folder`, which belongs to one run at a time."""
    return CheckpointFolder(
        path=folder,
        owner=lock.process.label if lock else "",
        lock=lock,
        pointer=POINTER,
        last_file=MANIFEST,
        own_names="iter_*",
        disk_full_advice="Free some space, raise the limit, keep fewer checkpoints "
        "(--keep-checkpoints), or give another folder (--save).",
    )


def checkpoint_name(iteration: int) -> str:
    """Name of the checkpoint of an iteration, iter_0000100."""
    return f"iter_{iteration:07d}"


def folder_of_node(folder: Path, node: int) -> Path:
    """Return the folder of the checkpoints of a replica, by that of the first."""
    return folder / f"node_{node}" if node else folder


def iteration_of(checkpoint: Path) -> int | None:
    """The iteration in a checkpoint's name; None if it is not named like one."""
    match = _NAME.fullmatch(checkpoint.name)
    return int(match[1] or match[2]) if match else None


@dataclass(frozen=True, kw_only=True)
class Retention:
    """Which checkpoints are kept: the last `newest` ones, and those of every `interval` iterations.

    With an `interval` alone, the newest one is kept as well. By default all are.
    """

    newest: int | None = None
    interval: int | None = None

    def __str__(self) -> str:
        flags = {"--save-retain-interval": self.interval, "--keep-checkpoints": self.newest}
        return " ".join(f"{name} {value}" for name, value in flags.items() if value is not None)


ALL_STAY = Retention()


@dataclass(frozen=True, kw_only=True)
class RunSaveHooks:
    """What rank 0, or its process for asynchronous saves, does when the tensors are written.

    state_text: the content of state.json.
    """

    checkpoints: CheckpointFolder
    iteration: int
    state_text: str
    keep: Retention = ALL_STAY

    def add_last_files(self, partial: Path, entries: Mapping[str, FileEntry]) -> None:
        """Write state.json and, as the last file, the manifest; `entries` are the tensors' files.

        Raises OSError.
        """
        write_atomically(partial / STATE, self.state_text)
        write_manifest(partial, {**entries, STATE: file_entry(partial / STATE)})

    def after_publication(self) -> list[Note]:
        """Remove old checkpoints; return what to log."""
        notes = []
        try:
            for path in prune(self.checkpoints, self.iteration, self.keep):
                text = f"removed {path}: {self.keep}"
                notes.append(Note(logging.INFO, text))
        except OSError as error:
            notes.append(Note(logging.WARNING, f"cannot remove an old checkpoint: {error}"))
        return notes


def candidates(folder: Path, iteration: int | None = None) -> tuple[list[Path], str | None]:
    """List the checkpoints in the order in which to try loading them, and a warning or None.

    With an `iteration` it is its checkpoint alone; raises InputError if there is none.

    The one that the pointer file names comes first (even if it is gone), then older ones, newest
    first, then newer ones. Without a usable pointer file the newest comes first. The warning is
    about an unusable pointer file, and about checkpoints newer than the one it names.
    """
    checkpoints: dict[int, Path] = {}
    for path in sorted(folder.glob("iter_*")) + sorted(folder.glob(".iter_*.replaced")):
        number = iteration_of(path)
        if number is not None and path.is_dir():
            checkpoints.setdefault(number, path)
    if iteration is not None:
        if iteration not in checkpoints:
            others = ", ".join(map(str, sorted(checkpoints))) or "none"
            raise InputError(
                f"--ckpt-step {iteration}: {folder} has no checkpoint of that iteration; it has "
                f"those of {others}"
            )
        return [checkpoints[iteration]], None
    newest_first = sorted(checkpoints, reverse=True)
    latest, warning = _latest_iteration(folder)
    if latest is None:
        return [checkpoints[iteration] for iteration in newest_first], warning
    older = [checkpoints[iteration] for iteration in newest_first if iteration < latest]
    newer = [checkpoints[iteration] for iteration in sorted(checkpoints) if iteration > latest]
    if newer:
        warning = f"{POINTER} says {latest}; {newer[-1].name} is newer and is not used"
    first = checkpoints.get(latest, folder / checkpoint_name(latest))
    return [first, *older, *newer], warning


def require_own(folder: Path, checkpoints: Sequence[Path], flag: str) -> None:
    """Raise InputError, with what it is, if the first checkpoint is of another program.

    Without any, `folder` itself may be one, or hold some under other names.
    """
    if checkpoints:
        path = checkpoints[0]
        if (path / MANIFEST).exists() or (path / STATE).exists():
            return
        found = format_of(path)
    else:
        path, found = find_format(folder) or (folder, None)
    if found is not None and found.kind in IMPORTED_KINDS:
        raise InputError(
            f"{flag} {folder}: {path} is {found.name}, which cannot be loaded here as it is: "
            f"tools/convert_hf.py --from-checkpoint {path} --save OTHER imports it"
        )
    if found is not None:
        raise foreign_error(path, found, f"{flag} {folder}", IMPORT)


def prune(checkpoints: CheckpointFolder, iteration: int, keep: Retention) -> list[Path]:
    """Remove complete checkpoints older than `iteration` that `keep` does not retain.

    Returns those that were removed. Newer ones (after a step back) and folders that are not
    complete checkpoints are left alone. Raises OSError.
    """
    if keep == ALL_STAY:
        return []
    older = {}
    for path in checkpoints.path.glob("iter_*"):
        number = iteration_of(path)
        if number is not None and number < iteration and _is_undamaged(path):
            older[number] = path
    num_newest = 1 if keep.newest is None else keep.newest
    superfluous = [
        older[number]
        for number in sorted(older, reverse=True)[max(num_newest - 1, 0) :]
        if keep.interval is None or number % keep.interval
    ]
    for path in superfluous:
        checkpoints.remove(path)
    return superfluous


def complete_iterations(folder: Path) -> list[int]:
    """Return the iterations of the checkpoints in a folder whose files are all there, in order."""
    numbered = ((iteration_of(path), path) for path in folder.glob("iter_*"))
    return sorted(number for number, path in numbered if number is not None and _is_undamaged(path))


def _is_undamaged(checkpoint: Path) -> bool:
    """Whether all files are there in full; their content is not read."""
    try:
        read_manifest(checkpoint)
    except DamagedError:
        return False
    return True


def _latest_iteration(folder: Path) -> tuple[int | None, str | None]:
    """Return the iteration in the pointer file or None, and what is wrong with the file or None."""
    text = checkpoint_folder(folder).latest()
    if text is None:
        return None, None
    if re.fullmatch(r"[0-9]+", text):
        return int(text), None
    return None, f"{POINTER} says {text[:40]!r} instead of a number; the newest checkpoint is used"
