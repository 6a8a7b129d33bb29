"""The engine's checkpoints on disk: each is there complete, or not at all.

    DIR/global_step10/      torch.distributed.checkpoint's shards and state.pt
    DIR/latest              global_step10
    DIR/.global_step20.tmp  one being written, or left over from a kill

One is written aside, renamed, and only then pointed to. It loads at any number of ranks and any
stage. All ranks call `save` and `load`; what fails on one rank fails on all.
"""

import io
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata

from zeropp.atomic import sync_folder, write_atomically
from zeropp.checkpoint import state_tensors as named
from zeropp.errors import InputError
from zeropp.ranks.coordination import broadcast_object, fail_together, gather_objects, rank

LATEST = "latest"
STATE = "state.pt"
FORMAT = 1


def save(
    folder: Path,
    tag: str,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    state: Mapping[str, Any],
    *,
    save_latest: bool = True,
) -> Path:
    """Write `folder/tag` and, with `save_latest`, point to it; return its path.

    `state` of rank 0 is kept: tensors, numbers, strings and containers of them. Raises InputError
    on all ranks for anything else in it, for a tag that is no folder's name or not the same on all
    ranks, and where the folder cannot be written.
    """
    _check_tag(tag)
    path, aside = folder / tag, folder / f".{tag}.tmp"
    with _explained(f"cannot save {path}"):
        with fail_together():
            content = _safe(state) if rank() == 0 else b""
            if rank() == 0:
                shutil.rmtree(aside, ignore_errors=True)
                aside.mkdir(parents=True)
        tensors = named.model_tensors(model, named.masters_of(optimizer))
        if optimizer is not None:
            tensors |= named.optimizer_tensors(model, optimizer)
            tensors |= named.tensors_behind(model, optimizer)
        with without_remarks():
            dcp.save(tensors, storage_writer=FileSystemWriter(aside))
        with fail_together():
            if rank() == 0:
                write_atomically(aside / STATE, lambda file: file.write(content))
                _publish(aside, path)
                if save_latest:
                    write_atomically(folder / LATEST, lambda file: file.write(tag.encode()))
    return path


def load(
    folder: Path,
    tag: str | None,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    *,
    strict: bool = True,
    with_moments: bool = True,
) -> tuple[Path, dict[str, Any]]:
    """Read `folder/tag`, by default the latest, into model and optimizer, in place.

    Returns its path and the state it was saved with. Without `with_moments` of the optimizer's only
    the fp32 weights it may hold are read. Without `strict`, what only the model or only
    the checkpoint has is left alone. Raises InputError on all ranks where there is no such
    checkpoint, where it is not complete, and for one of another model.
    """
    with _explained(f"cannot load a checkpoint from {folder}"):
        with fail_together():
            path = _find(folder, tag) if rank() == 0 else None
        path = broadcast_object(path)
        with fail_together():
            state = torch.load(path / STATE, map_location="cpu", weights_only=True)
            saved = FileSystemReader(path).read_metadata()
            held = named.model_tensors(model, named.masters_of(optimizer))
            tensors = _fitting(path, held, saved, strict)
            moments, behind = {}, {}
            with_moments = with_moments and optimizer is not None
            if with_moments:
                if not state["optimizer_saved"]:
                    raise InputError(
                        f"{path} was saved without an optimizer: load it with "
                        "load_optimizer_states=False"
                    )
                moments = named.empty_optimizer_tensors(model, optimizer, saved)
                behind = named.tensors_behind(model, optimizer, saved)
        with without_remarks():
            dcp.load({**tensors, **moments, **behind}, storage_reader=FileSystemReader(path))
    if with_moments:
        named.restore_optimizer(model, optimizer, moments)
    named.masters_loaded(optimizer, behind=bool(behind))
    return path, state


@contextmanager
def without_remarks() -> Iterator[None]:
    """Around checkpoint calls: without torch's remark that there is one rank only, no news."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        warnings.filterwarnings("ignore", message=".*assuming the intent is to")
        yield


def _find(folder: Path, tag: str | None) -> Path:
    if not folder.is_dir():
        raise InputError(f"there is no folder {folder} to load a checkpoint from")
    tags = sorted(one.parent.name for one in folder.glob(f"[!.]*/{STATE}"))
    there = f"there are {', '.join(tags)}" if tags else "there is none"
    if tag is None:
        pointer = folder / LATEST
        if not pointer.is_file():
            raise InputError(f"{pointer} does not exist: give the tag of a checkpoint; {there}")
        tag = pointer.read_text().strip()
    for path in (folder / tag, _replaced(folder / tag)):
        if (path / STATE).is_file():
            return path
    raise InputError(f"there is no complete checkpoint {tag} in {folder}; {there}")


def _fitting(
    path: Path, tensors: dict[str, torch.Tensor], saved: Metadata, strict: bool
) -> dict[str, torch.Tensor]:
    """The model's tensors that the checkpoint has in this shape; all of them if `strict`."""
    differences = named.shape_differences(tensors, saved)
    if differences and strict:
        raise InputError(
            f"the checkpoint {path} is of another model:\n  " + "\n  ".join(differences[:40])
        )
    there = saved.state_dict_metadata
    return {
        name: tensor
        for name, tensor in tensors.items()
        if name in there and tuple(there[name].size) == tuple(tensor.shape)
    }


def _publish(aside: Path, path: Path) -> None:
    """Rename a complete checkpoint into place; one of the same name is there until then."""
    replaced = _replaced(path)
    if path.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        path.rename(replaced)
    aside.rename(path)
    sync_folder(path.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def _replaced(path: Path) -> Path:
    return path.with_name(f".{path.name}.replaced")


def _check_tag(tag: str) -> None:
    tags = gather_objects(tag)
    if len(set(tags)) > 1:
        raise InputError(f"the tag must be the same on all ranks, and it is {', '.join(tags)}")
    if not tag or tag.startswith(".") or Path(tag).name != tag or tag == LATEST:
        raise InputError(f"the tag {tag!r} is not a folder's name")


def _safe(state: Mapping[str, Any]) -> bytes:
    """The state as bytes that can be read without running code from the file."""
    buffer = io.BytesIO()
    torch.save({"format": FORMAT, **state}, buffer)
    try:
        torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
    except Exception as problem:
        raise InputError(
            "client_state may hold tensors, numbers, strings, and lists, tuples and dicts of them; "
            f"this one would not load again: {str(problem).splitlines()[0]:.200}"
        ) from problem
    return buffer.getvalue()


@contextmanager
def _explained(what: str) -> Iterator[None]:
    """Turn an error of the operating system, on any rank, into an InputError."""
    try:
        yield
    except CheckpointException as failure:
        number, error = min((number, wrapped[0]) for number, wrapped in failure.failures.items())
        if not isinstance(error, OSError):
            raise
        raise InputError(f"{what} (rank {number}): {error}") from failure
    except OSError as error:
        raise InputError(f"{what}: {error}") from error
