"""Save and load model, optimizer and training state.

All ranks call `save` and `load`; an error on one rank is raised on all. What decides that a
checkpoint is complete is in `zeropp.checkpoint.complete_or_absent`, what tells that one is damaged
in `manifest.py`.
"""

import logging
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from megatron_zpp.checkpoint import manifest
from megatron_zpp.checkpoint.iteration_folders import (
    ALL_STAY,
    Retention,
    RunSaveHooks,
    candidates,
    checkpoint_folder,
    checkpoint_name,
    require_own,
)
from megatron_zpp.checkpoint.training_state import (
    TrainingState,
    check_architecture,
    check_optimizer_saved,
    check_tokenizer,
    read_state,
    state_text,
)
from megatron_zpp.checkpoint.weight_source import AdamState, WeightSource
from zeropp.checkpoint import (
    METADATA,
    MODEL,
    OPTIMIZER,
    AsyncWriter,
    CheckpointFolder,
    codes_to_save,
    file_entry,
    hold_folder,
    load_state,
    name_by_rank,
    names_elsewhere,
    new_checkpoint,
    os_errors_as_input_errors,
    require_visible,
    state_to_save,
    with_owner,
    write_one_by_one,
    write_shards,
)
from zeropp.errors import InputError, first_few
from zeropp.ranks import broadcast_object, fail_together, gather_objects, rank, world_size

log = logging.getLogger("megatron_zpp")


def save(
    checkpoints: CheckpointFolder,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    state: TrainingState,
    *,
    keep: Retention = ALL_STAY,
    save_optimizer: bool = True,
    writer: AsyncWriter | None = None,
    others: Mapping[str, torch.Tensor] = MappingProxyType({}),
) -> Path:
    """Write `iter_N` into a folder, and let its pointer file name it; return its path.

    Older checkpoints are kept as `keep` says. With a `writer`, this waits until its previous save
    is done, and then only copies the state; the writer's `finish` waits until the checkpoint is
    complete. `others` are further tensors of the run. Raises InputError on all ranks if the folder
    cannot be written, the disk is full, or another job has taken the folder over; it is then as it
    was before.
    """
    checkpoints = with_owner(checkpoints)
    with fail_together():
        state = replace(state, optimizer_saved=optimizer is not None and save_optimizer)
        tensors = state_to_save(model, optimizer, with_optimizer_state=state.optimizer_saved)
        hooks = RunSaveHooks(
            checkpoints=checkpoints,
            iteration=state.iteration,
            state_text=state_text(state),
            keep=keep,
        )
        tensors |= others
    tensors = name_by_rank(tensors, names_elsewhere(model)) | codes_to_save(model)
    if writer is None:
        with _new_checkpoint(tensors, hooks) as partial:
            write_shards(partial, tensors)
        if rank() == 0:
            for note in hooks.after_publication():
                log.log(note.level, note.text)
    else:
        writer.save(
            checkpoints,
            checkpoint_name(state.iteration),
            tensors,
            pointer_text=_pointer_text(state.iteration),
            hooks=hooks,
        )
    return checkpoints.path / checkpoint_name(state.iteration)


def save_weights(
    folder: Path | str, weights: WeightSource, state: TrainingState, adam: AdamState | None = None
) -> Path:
    """Write `folder/iter_N` of weights from elsewhere, one tensor in memory at a time.

    Runs on one process and writes a file for each tensor; without `adam` there is no optimizer
    state. Returns the checkpoint's path; errors as in `save`.
    """
    state = replace(state, optimizer_saved=adam is not None)
    tensors = {MODEL + name: tensor for name, tensor in weights.facts().items()}
    if adam is not None:
        tensors |= {OPTIMIZER + name: tensor for name, tensor in adam.facts().items()}
    with hold_folder(Path(folder), "--save", is_first_on_machine=True) as lock:
        hooks = RunSaveHooks(
            checkpoints=checkpoint_folder(Path(folder), lock),
            iteration=state.iteration,
            state_text=state_text(state),
        )
        with _new_checkpoint(tensors, hooks) as partial:
            write_one_by_one(partial, tensors, lambda name: _read_from(name, weights, adam))
    return Path(folder) / checkpoint_name(state.iteration)


def _read_from(name: str, weights: WeightSource, adam: AdamState | None) -> torch.Tensor:
    if name.startswith(MODEL):
        return weights.read(name.removeprefix(MODEL))
    return adam.read(name.removeprefix(OPTIMIZER))


def load(
    folder: Path | str,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    *,
    load_optimizer: bool = True,
    architecture: Mapping[str, Any] | None = None,
    tokenizer: str | None = None,
    verify: bool = True,
    iteration: int | None = None,
    fine_tunes: bool = False,
    others: Mapping[str, torch.Tensor] = MappingProxyType({}),
) -> TrainingState | None:
    """Read the newest complete checkpoint into model and optimizer, in place; return its state.

    None if there is no checkpoint in `folder`. A damaged one is named in a warning and the one
    before it is used; with an `iteration`, only that one. `others` are further tensors to
    read, those that are there. Raises InputError if none is usable, or if the checkpoint is of
    another program, architecture or tokenizer (with every size and setting that differs; one that
    `fine_tunes` may change what no weight depends on).
    """
    path = choose(folder, verify=verify, iteration=iteration)
    if path is None:
        return None
    load_optimizer = load_optimizer and optimizer is not None
    with os_errors_as_input_errors(f"cannot load {path}"):
        with fail_together():
            state = read_state(path)

        def check(shape_differences: list[str]) -> None:
            check_architecture(path, state, architecture, shape_differences, fine_tunes=fine_tunes)
            check_tokenizer(path, state, tokenizer)
            if load_optimizer:
                check_optimizer_saved(path, state)

        load_state(
            path,
            model,
            optimizer,
            check=check,
            with_optimizer_state=load_optimizer,
            others=others,
        )
    return state


def load_weights(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    """Read the weights of a checkpoint alone, of the same model, in place."""

    def check(differences: list[str]) -> None:
        if differences:
            raise InputError(f"{path} is of another model: {first_few(differences)}")

    with os_errors_as_input_errors(f"cannot load {path}"):
        load_state(path, model, optimizer, check=check, with_optimizer_state=False)


def choose(
    folder: Path | str,
    *,
    verify: bool = True,
    iteration: int | None = None,
    flag: str = "--load",
) -> Path | None:
    """Return the checkpoint to load: the one that the pointer file names, or the one before it.

    All files are read and their checksums compared, the work divided among the ranks; without
    `verify`, only their sizes are compared. A damaged checkpoint is named in a warning. With an
    `iteration`, its checkpoint is the only choice. None if there is no checkpoint. Raises
    InputError if there are some and none is complete and undamaged, and for another program's, with
    the `flag` that names the folder.
    """
    folder = Path(folder)
    with fail_together():
        choices = candidates(folder, iteration) if rank() == 0 else None
        if choices:
            require_own(folder, choices[0], flag)
    found, warning = broadcast_object(choices)
    paths = [folder / path.name for path in found]  # machines may know the folder by other paths
    if warning and rank() == 0:
        log.warning("%s: %s", folder, warning)
    _require_seen(paths, f"{flag} {folder}")
    damages = []
    for path in paths:
        problem = damage(path, verify=verify)
        if problem is None:
            return path
        damages.append(f"{path}: {problem}")
        if rank() == 0:
            log.warning("the checkpoint %s is damaged: %s; trying the previous one", path, problem)
    if damages:
        raise InputError(
            "no checkpoint is complete:\n  "
            + "\n  ".join(damages)
            + "\nRestore one of them, or start afresh in another folder."
        )
    return None


def _require_seen(paths: list[Path], what: str) -> None:
    """Raise InputError on all ranks if rank 0 sees any of these checkpoints and others see none."""
    views = gather_objects((socket.gethostname(), any(path.is_dir() for path in paths)))
    (first_host, is_there), *_ = views
    blind = [f"rank {number} on {host}" for number, (host, sees) in enumerate(views) if not sees]
    if is_there and blind:
        raise InputError(
            f"{what}: rank 0 on {first_host} sees {paths[0].name}; no checkpoint is seen by "
            f"{first_few(blind)}: name a folder that all machines share"
        )


def damage(path: Path, *, verify: bool = True) -> str | None:
    """Say what is wrong with a checkpoint, None if nothing; each rank reads a part of its files.

    Without `verify`, no file is read: they must be there and have the size they were written with.
    """
    problem = None
    try:
        entries = manifest.read_manifest(path)
        if verify:
            largest_first = sorted(entries, key=lambda name: entries[name].bytes, reverse=True)
            names = largest_first[rank() :: world_size()]
            manifest.check_content(path, {name: entries[name] for name in names})
    except (manifest.DamagedError, OSError) as error:
        problem = str(error)
    problems = [text for text in gather_objects(problem) if text is not None]
    return problems[0] if problems else None


@contextmanager
def _new_checkpoint(tensors: Mapping[str, torch.Tensor], hooks: RunSaveHooks) -> Iterator[Path]:
    """Yield the folder for the tensors' files; then add the other files and publish it."""
    with new_checkpoint(
        hooks.checkpoints,
        checkpoint_name(hooks.iteration),
        sum(tensor.nbytes for tensor in tensors.values()),
        pointer_text=_pointer_text(hooks.iteration),
    ) as partial:
        yield partial
        _add_last_files(partial, hooks)


def _add_last_files(partial: Path, hooks: RunSaveHooks) -> None:
    """Write state.json and, as the last file, the manifest of all ranks' files."""
    with fail_together():
        paths = list(partial.glob(f"__{rank()}_*"))
        if rank() == 0:
            paths.append(partial / METADATA)
        shards = {path.name: file_entry(path) for path in paths}
    entries = {name: entry for part in gather_objects(shards) for name, entry in part.items()}
    with fail_together():
        if rank() == 0:
            require_visible(partial, entries)
            hooks.add_last_files(partial, entries)


def _pointer_text(iteration: int) -> str:
    return f"{iteration}\n"
