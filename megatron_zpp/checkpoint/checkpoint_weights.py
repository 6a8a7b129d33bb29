"""The model's weights in a checkpoint, read as whole tensors one at a time, on one process."""

import logging
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from megatron_zpp.checkpoint.checkpoint import choose, damage
from megatron_zpp.checkpoint.iteration_folders import folder_of_node, iteration_of
from megatron_zpp.checkpoint.training_state import STATE, read_state
from zeropp.checkpoint import MODEL, OneByOneReader, model_part, saved_tensors
from zeropp.errors import InputError

log = logging.getLogger("megatron_zpp")


def find_checkpoint(folder: Path, flag: str = "--load") -> Path:
    """The newest complete checkpoint in `folder`, or `folder` itself if it is a checkpoint.

    Raises InputError, which names `flag`, if there is none.
    """
    if iteration_of(folder) is not None:
        if problem := damage(folder):
            raise InputError(f"{flag} {folder}: {problem}")
        return folder
    path = choose(folder, flag=flag)
    if path is None:
        raise InputError(f"{flag} {folder}: there is no checkpoint (iter_0000100) in it")
    return path


class CheckpointWeights:
    """A `WeightSource` of the model's parameters and buffers in the checkpoint at `path`.

    Where independent replicas have saved one each, they are the means over all of them.

    keep: which of them to include, by name; all by default.
    """

    def __init__(self, path: Path, keep: Callable[[str], bool] = lambda name: True) -> None:
        self._readers = [OneByOneReader(each) for each in _of_all_nodes(path)]
        self._facts = {
            name: tensor for name, tensor in model_part(saved_tensors(path)).items() if keep(name)
        }

    def facts(self) -> dict[str, Tensor]:
        """Every tensor's shape and dtype by name, as tensors on the meta device."""
        return dict(self._facts)

    def read(self, name: str) -> Tensor:
        """One whole tensor on the CPU, in the dtype in which it was saved."""
        tensor = torch.empty_like(self._facts[name], device="cpu")
        first, *others = self._readers
        first.fill(MODEL + name, tensor)
        if not others or not tensor.is_floating_point():
            return tensor
        total, term = tensor.double(), torch.empty_like(tensor)
        for reader in others:
            reader.fill(MODEL + name, term)
            total += term
        return (total / len(self._readers)).to(tensor.dtype)


def _of_all_nodes(path: Path) -> list[Path]:
    """Return the checkpoints whose mean counts: that at `path`, and those of other replicas."""
    own = read_state(path)
    num_worlds = own.num_worlds
    others = [folder_of_node(path.parent, node) / path.name for node in range(1, num_worlds)]
    missing = [
        str(each)
        for each in others
        if not (each / STATE).is_file() or read_state(each).launch != own.launch
    ]
    if missing:
        log.warning(
            f"{path} is of one of {num_worlds} independent replicas, and its weights are taken "
            f"alone, as {missing[0]} is missing or of another launch"
        )
        return [path]
    for each in others:
        if problem := damage(each):
            raise InputError(f"{each}: {problem}")
    return [path, *others]
