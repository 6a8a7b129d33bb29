"""Save and load model, optimizer and training state, complete or not at all.

The shards are torch.distributed.checkpoint's, so a checkpoint loads at any number of ranks and any
ZeRO stage. All ranks call `save` and `load`; what fails on one rank fails on all. `manifest.py`
keeps the folder.
"""

import errno
import json
import logging
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import MetadataIndex

from megatron_zpp.checkpoint import manifest
from megatron_zpp.checkpoint.shard_weights import Weights
from zeropp.atomic import write_atomically
from zeropp.checkpoint import state_tensors as named
from zeropp.checkpoint.engine_checkpoint import without_remarks
from zeropp.errors import InputError
from zeropp.ranks.coordination import (
    broadcast_object,
    fail_together,
    gather_objects,
    rank,
    world_size,
)

STATE = "state.json"
FORMAT = 1
MOST_LINES = 40
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_log = logging.getLogger("megatron_zpp")


@dataclass(frozen=True, kw_only=True)
class TrainingState:
    """Where training stands, beside the tensors. Everything in it can be written as JSON.

    `architecture` holds what must be equal in a model that loads the checkpoint, `configuration`
    all settings of the run that saved it, `tokenizer` its tokenizer's fingerprint. Whether the
    optimizer's state was to be saved is set by `save`.
    """

    iteration: int
    consumed_samples: int
    consumed_tokens: int
    consumed_valid_samples: int = 0
    skipped_iterations: int = 0
    seed: int
    world_size: int
    stage: int
    tokenizer: str
    optimizer_saved: bool = True
    loss_scaler: dict[str, Any] = field(default_factory=dict)
    schedule: dict[str, Any] = field(default_factory=dict)
    history: dict[str, Any] = field(default_factory=dict)
    architecture: dict[str, Any] = field(default_factory=dict)
    configuration: dict[str, Any] = field(default_factory=dict)


def save(
    folder: Path | str,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    state: TrainingState,
    *,
    keep: int | None = None,
    save_optimizer: bool = True,
) -> Path:
    """Write `folder/iter_N`, point to it, prune to the `keep` newest; return its path.

    Raises InputError on all ranks when the folder cannot be written or the disk is full; the
    folder is then as it was before.
    """
    folder = Path(folder)
    with fail_together():
        tensors = named.model_tensors(model, named.masters_of(optimizer))
        state = replace(state, optimizer_saved=optimizer is not None and save_optimizer)
        if state.optimizer_saved:
            tensors |= named.optimizer_tensors(model, optimizer)
            tensors |= named.tensors_behind(model, optimizer)
    path = _written(folder, tensors, state)
    if rank() == 0 and keep is not None:
        _prune(folder, state.iteration, keep)
    return path


def save_weights(folder: Path | str, weights: Weights, state: TrainingState) -> Path:
    """Write `folder/iter_N` of weights that lie elsewhere, one tensor in memory at a time.

    On one process, a file for each tensor, without optimizer; return its path. Errors as `save`.
    """
    state = replace(state, optimizer_saved=False)
    tensors = {named.MODEL + name: facts for name, facts in weights.facts().items()}
    return _written(Path(folder), tensors, state, _Reading(weights))


def load(
    folder: Path | str,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    *,
    load_optimizer: bool = True,
    architecture: Mapping[str, Any] | None = None,
    tokenizer: str | None = None,
) -> TrainingState | None:
    """Read the newest complete checkpoint into model and optimizer, in place; return its state.

    None if there is no checkpoint in `folder`. A damaged one is named in a warning and the one
    before it is used. Raises InputError if none is usable, or if the checkpoint is of another
    architecture or tokenizer (with every size and field that differs).
    """
    path = choose(folder)
    if path is None:
        return None
    wants_optimizer = optimizer is not None and load_optimizer
    with _explained(f"cannot load {path}", Path(folder)):
        with fail_together():
            state = read_state(path)
            saved = FileSystemReader(path).read_metadata()
            tensors = named.model_tensors(model, named.masters_of(optimizer))
            _check(path, state, named.shape_differences(tensors, saved), architecture)
            _check_tokenizer(path, state, tokenizer)
            moments, behind = {}, {}
            if wants_optimizer:
                moments = named.empty_optimizer_tensors(model, optimizer, saved)
                behind = named.tensors_behind(model, optimizer, saved)
                _check_optimizer(path, state)
        with without_remarks():
            dcp.load({**tensors, **moments, **behind}, storage_reader=FileSystemReader(path))
    if wants_optimizer:
        named.restore_optimizer(model, optimizer, moments)
    named.masters_loaded(optimizer, behind=bool(behind))
    return state


def choose(folder: Path | str) -> Path | None:
    """Return the checkpoint to load: the one pointed to, or the newest complete one before it.

    All files are read and their checksums compared, the work shared by the ranks. None if there
    is none. Raises InputError if there are some and none is complete.
    """
    folder = Path(folder)
    with fail_together():
        found = manifest.candidates(folder) if rank() == 0 else None
    paths, oddity = broadcast_object(found)
    if oddity and rank() == 0:
        _log.warning("%s: %s", folder, oddity)
    damages = []
    for path in paths:
        problem = damage(path)
        if problem is None:
            return path
        damages.append(f"{path}: {problem}")
        if rank() == 0:
            _log.warning("the checkpoint %s is damaged: %s; the one before is tried", path, problem)
    if damages:
        raise InputError(
            "no checkpoint is complete:\n  "
            + "\n  ".join(damages)
            + f"\nRestore one of them, or remove {folder} to start afresh."
        )
    return None


def damage(path: Path) -> str | None:
    """Return what is wrong with a checkpoint, or None; each rank reads a share of its files."""
    problem = None
    try:
        entries = manifest.read_manifest(path)
        by_size = sorted(entries, key=lambda name: entries[name].bytes, reverse=True)
        mine = by_size[rank() :: world_size()]
        manifest.check_content(path, {name: entries[name] for name in mine})
    except (manifest.DamagedError, OSError) as error:
        problem = str(error)
    return next((found for found in gather_objects(problem) if found), None)


def read_state(path: Path) -> TrainingState:
    """Return a checkpoint's training state; raises InputError if this program cannot read it."""
    content = json.loads((path / STATE).read_text())
    if content.pop("format") != FORMAT:
        raise InputError(f"{path} was written by another version of this program")
    unknown = sorted(set(content) - {entry.name for entry in fields(TrainingState)})
    if unknown:
        raise InputError(f"{path / STATE} has unknown entries: {', '.join(unknown)}")
    return TrainingState(**content)


class _Writer(FileSystemWriter):
    """Says which error of the operating system is behind torch.save's RuntimeError."""

    def write_data(self, plan: Any, planner: Any) -> Any:
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            if isinstance(error.__context__, OSError):
                raise error.__context__ from error
            raise


class _Reading(DefaultSavePlanner):
    """Plans from shapes, and reads a tensor when it is to be written."""

    def __init__(self, weights: Weights) -> None:
        super().__init__()
        self.weights = weights

    def lookup_object(self, index: MetadataIndex) -> torch.Tensor:
        return self.weights.read(index.fqn.removeprefix(named.MODEL))


def _written(
    folder: Path,
    tensors: dict[str, torch.Tensor],
    state: TrainingState,
    reading: _Reading | None = None,
) -> Path:
    """Write the checkpoint, or leave nothing of it behind and say why."""
    num_bytes = named.num_bytes(tensors.values())
    try:
        with _explained(f"cannot save in {folder}", folder, num_bytes):
            return _write(folder, tensors, state, num_bytes, reading)
    except BaseException:
        if rank() == 0:
            shutil.rmtree(manifest.aside_path(folder, state.iteration), ignore_errors=True)
        raise


def _write(
    folder: Path,
    tensors: dict[str, torch.Tensor],
    state: TrainingState,
    num_bytes: int,
    reading: _Reading | None,
) -> Path:
    aside = manifest.aside_path(folder, state.iteration)
    with fail_together():
        if rank() == 0:
            folder.mkdir(parents=True, exist_ok=True)
            manifest.clean(folder)
            if shutil.disk_usage(folder).free < num_bytes:
                raise OSError(errno.ENOSPC, "too little space left", str(folder))
            aside.mkdir()
    with without_remarks():
        # The writer keeps what it has written of a file until that is complete.
        writer = _Writer(aside, single_file_per_rank=reading is None)
        dcp.save(tensors, storage_writer=writer, planner=reading, no_dist=reading is not None)
    with fail_together():
        mine = {path.name: manifest.entry_of(path) for path in aside.glob(f"__{rank()}_*")}
    entries = {name: entry for part in gather_objects(mine) for name, entry in part.items()}
    with fail_together():
        if rank() == 0:
            _complete(aside, entries, state)
            manifest.publish(folder, state.iteration)
    return manifest.final_path(folder, state.iteration)


def _complete(aside: Path, entries: dict[str, manifest.Entry], state: TrainingState) -> None:
    text = json.dumps({"format": FORMAT, **asdict(state)}, indent=1) + "\n"
    write_atomically(aside / STATE, lambda file: file.write(text.encode()))
    for name in (STATE, ".metadata"):
        entries[name] = manifest.entry_of(aside / name)
    elsewhere = [name for name in entries if not (aside / name).exists()]
    if elsewhere:
        raise InputError(
            f"rank 0 does not see {named.few(elsewhere)} in {aside}: --save must be a folder that "
            "all nodes share"
        )
    manifest.write_manifest(aside, entries)


def _prune(folder: Path, iteration: int, keep: int) -> None:
    try:
        for path in manifest.prune(folder, iteration, keep):
            _log.info("removed %s: --keep-checkpoints %d", path, keep)
    except OSError as error:
        _log.warning("cannot remove an old checkpoint: %s", error)


def _check(
    path: Path,
    state: TrainingState,
    shapes: list[str],
    architecture: Mapping[str, Any] | None,
) -> None:
    here = {} if architecture is None else json.loads(json.dumps(dict(architecture)))
    lines = [
        f"{name} is {state.architecture.get(name)} in the checkpoint, {here.get(name)} in the model"
        for name in (*here, *(set(state.architecture) - set(here) if here else ()))
        if state.architecture.get(name) != here.get(name)
    ]
    lines += shapes
    if lines:
        more = len(lines) - MOST_LINES
        shown = [*lines[:MOST_LINES], *([f"and {more} more"] if more > 0 else [])]
        raise InputError(
            f"the checkpoint {path} is of another architecture:\n  "
            + "\n  ".join(shown)
            + "\nGive the settings it was trained with, or load another checkpoint."
        )


def _check_tokenizer(path: Path, state: TrainingState, tokenizer: str | None) -> None:
    if tokenizer is not None and state.tokenizer != tokenizer:
        raise InputError(
            f"the checkpoint {path} was trained with another tokenizer (fingerprint "
            f"{state.tokenizer[:12]}, now {tokenizer[:12]}): its token ids mean other text. "
            "Give the tokenizer it was trained with."
        )


def _check_optimizer(path: Path, state: TrainingState) -> None:
    if not state.optimizer_saved:
        raise InputError(
            f"the checkpoint {path} has no optimizer state (it was saved with --no-save-optim): "
            "add --no-load-optim to start with a fresh optimizer"
        )


@contextmanager
def _explained(what: str, folder: Path, num_bytes: int = 0) -> Iterator[None]:
    """Turn an error of the operating system, on any rank, into an InputError that says enough."""
    try:
        yield
    except CheckpointException as failure:
        number, error = min((number, wrapped[0]) for number, wrapped in failure.failures.items())
        if isinstance(error, InputError):
            raise error from failure
        if not isinstance(error, OSError):
            raise
        raise _input_error(f"{what} (rank {number})", error, folder, num_bytes) from failure
    except OSError as error:
        raise _input_error(what, error, folder, num_bytes) from error


def _input_error(what: str, error: OSError, folder: Path, num_bytes: int) -> InputError:
    if error.errno not in _FULL:
        return InputError(f"{what}: {error}")
    free = shutil.disk_usage(folder).free
    return InputError(
        f"{what}: {error.strerror}. The checkpoint needs {num_bytes:,} bytes, {free:,} are free "
        "there. Free some space, raise the limit, keep fewer checkpoints (--keep-checkpoints), or "
        "give another folder (--save)."
    )
