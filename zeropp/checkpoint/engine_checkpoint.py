"""Checkpoints of the engine that `zeropp.initialize` returns, in DeepSpeed's layout.

    DIR/global_step10/   torch.distributed.checkpoint's shards and, last, state.pt
    DIR/latest           global_step10

All ranks call `save` and `load`; an error on one rank is raised on all.
"""

import io
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zeropp.atomic import write_atomically
from zeropp.checkpoint.checkpoint_formats import find_format, foreign_error
from zeropp.checkpoint.complete_or_absent import CheckpointFolder
from zeropp.checkpoint.kept_codes import codes_to_save
from zeropp.checkpoint.rank_values import name_by_rank
from zeropp.checkpoint.shard_files import (
    damage_as_input_errors,
    os_errors_as_input_errors,
    write_shards,
)
from zeropp.checkpoint.shared_folder import new_checkpoint
from zeropp.checkpoint.state_tensors import (
    frozen_names,
    load_state,
    state_to_save,
    stored_quantized,
    tied_names,
    without_frozen,
)
from zeropp.errors import InputError, RefusedCall, first_few, first_lines
from zeropp.ranks.coordination import broadcast_object, fail_together, gather_objects, rank

IMPORT = "the model's own from_pretrained reads a Hugging Face folder, before zeropp.initialize"
LATEST = "latest"
STATE = "state.pt"
FORMAT = 1
log = logging.getLogger("zeropp")


def save(
    folder: Path,
    tag: str,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    state: Mapping[str, Any],
    *,
    save_latest: bool = True,
    exclude_frozen: bool = False,
) -> Path:
    """Write `folder/tag` and, with `save_latest`, let `latest` name it; return its path.

    `exclude_frozen` leaves out parameters that do not require gradients.
    The `state` of rank 0 is saved: tensors, numbers, strings and containers of them. Raises
    InputError on all ranks for anything else in it, for a tag that is not a folder name, if ranks
    have other folders or tags, and if the folder cannot be written.
    """
    _check_place(folder, tag)
    frozen = frozen_names(model)
    names = {
        "tied": tied_names(model),
        "frozen": frozen,
        "stored_elsewhere": frozen if exclude_frozen else stored_quantized(model),
    }
    with fail_together():
        state_bytes = _serialize({**state, **names}) if rank() == 0 else b""
        tensors = state_to_save(model, optimizer)
        if exclude_frozen:
            tensors = without_frozen(tensors, model)
    tensors = name_by_rank(tensors) | codes_to_save(model)
    pointer_text = tag if save_latest else None
    checkpoints = _checkpoint_folder(folder)
    num_bytes = sum(tensor.nbytes for tensor in tensors.values())
    with new_checkpoint(checkpoints, tag, num_bytes, pointer_text) as partial:
        write_shards(partial, tensors)
        with fail_together():
            if rank() == 0:
                write_atomically(partial / STATE, lambda file: file.write(state_bytes))
    return folder / tag


def load(
    folder: Path,
    tag: str | None,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    *,
    strict: bool = True,
    with_optimizer_state: bool = True,
) -> tuple[Path, dict[str, Any]] | None:
    """Read `folder/tag`, by default the latest, into model and optimizer, in place.

    Returns its path and the state it was saved with; None, with a warning, if no tag is given and
    `folder` has no file `latest`. Without `with_optimizer_state`, only the fp32
    weights that the optimizer may hold are read into it. Without `strict`, tensors that only the
    model or only the checkpoint has are left alone. Raises InputError on all ranks if there is no
    such checkpoint, if it is not complete, and if it is of another model.
    """
    with os_errors_as_input_errors(f"cannot load a checkpoint from {folder}"):
        with fail_together():
            path = find(folder, tag, may_be_empty=True) if rank() == 0 else None
        path = broadcast_object(path)
        if path is None:
            return None
        with fail_together():
            state = read_state(path)
            with_optimizer_state = with_optimizer_state and optimizer is not None
            if with_optimizer_state and not state["optimizer_saved"]:
                raise InputError(
                    f"{path} was saved without an optimizer: load it with "
                    "load_optimizer_states=False"
                )

        def check(differences: list[str]) -> None:
            if differences and strict:
                raise InputError(
                    f"the checkpoint {path} is of another model:\n  {first_lines(differences)}"
                )

        load_state(path, model, optimizer, check=check, with_optimizer_state=with_optimizer_state)
    return path, state


def _checkpoint_folder(folder: Path) -> CheckpointFolder:
    return CheckpointFolder(
        path=folder,
        pointer=LATEST,
        last_file=STATE,
        disk_full_advice="Free some space, raise the limit, or save to another folder.",
    )


def find(folder: Path, tag: str | None, *, may_be_empty: bool = False) -> Path | None:
    """Return the path of a complete checkpoint in `folder`, by default the latest.

    With `may_be_empty`, a folder that names no latest one gives None and a warning. Raises
    InputError if there is no such checkpoint, and for one of another program.
    """
    checkpoints = _checkpoint_folder(folder)
    tags = sorted(path.name for path in folder.glob("[!.]*") if checkpoints.is_complete(path))
    if not tags and folder.is_dir():
        _require_own(folder, tag)
    existing = f"there are {', '.join(tags)}" if tags else "there is no checkpoint"
    if tag is None:
        tag = checkpoints.latest()
    if tag is None:
        if may_be_empty:
            log.warning("%s does not exist, and nothing is loaded; %s", folder / LATEST, existing)
            return None
        raise InputError(
            f"{folder / LATEST} does not exist: give the tag of a checkpoint; {existing}"
        )
    path = checkpoints.find(tag)
    if path is None:
        raise InputError(f"there is no complete checkpoint {tag} in {folder}; {existing}")
    return path


def read_state(path: Path) -> dict[str, Any]:
    """Return what `save` got as the state of a checkpoint, with the names of its weights."""
    with damage_as_input_errors(path / STATE):
        return torch.load(path / STATE, map_location="cpu", weights_only=True)


def _require_own(folder: Path, tag: str | None) -> None:
    """Raise InputError, with what it is, for a checkpoint of another program."""
    foreign = find_format(folder if tag is None else folder / tag)
    if foreign is not None:
        raise foreign_error(*foreign, f"load_checkpoint of {folder}", IMPORT)


def _check_place(folder: Path, tag: str) -> None:
    folders, tags = zip(*gather_objects((os.path.realpath(folder), tag)), strict=True)
    for name, values in (("save_dir, the folder,", folders), ("tag", tags)):
        different = [*dict.fromkeys(values)]
        if len(different) > 1:
            raise RefusedCall(
                f"the {name} must be the same on all ranks, and it is {first_few(different)}: "
                "send the first rank's to all, by torch.distributed.broadcast_object_list"
            )
    if not tag or tag.startswith(".") or Path(tag).name != tag or tag == LATEST:
        raise InputError(f"the tag {tag!r} is not a folder's name")


def _serialize(state: Mapping[str, Any]) -> bytes:
    """The state as bytes that load without running code from the file."""
    buffer = io.BytesIO()
    torch.save({"format": FORMAT, **state}, buffer)
    try:
        torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
    except Exception as error:
        raise InputError(
            "client_state may hold tensors, numbers, strings, and lists, tuples and dicts of them; "
            f"this one would not load again: {str(error).splitlines()[0]:.200}"
        ) from error
    return buffer.getvalue()
