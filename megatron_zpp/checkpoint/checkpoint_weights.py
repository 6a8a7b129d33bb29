"""The model's weights in a checkpoint, read as whole tensors one at a time, on one process."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from megatron_zpp.checkpoint.checkpoint import choose, damage
from megatron_zpp.checkpoint.iteration_folders import iteration_of
from zeropp.checkpoint.shard_files import OneByOneReader, saved_tensors
from zeropp.checkpoint.state_tensors import MODEL, model_part
from zeropp.errors import InputError


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

    keep: which of them to include, by name; all by default.
    """

    def __init__(self, path: Path, keep: Callable[[str], bool] = lambda name: True) -> None:
        self._reader = OneByOneReader(path)
        self._facts = {
            name: tensor for name, tensor in model_part(saved_tensors(path)).items() if keep(name)
        }

    def facts(self) -> dict[str, Tensor]:
        """Every tensor's shape and dtype by name, as tensors on the meta device."""
        return dict(self._facts)

    def read(self, name: str) -> Tensor:
        """One whole tensor on the CPU, in the dtype in which it was saved."""
        tensor = torch.empty_like(self._facts[name], device="cpu")
        self._reader.fill(MODEL + name, tensor)
        return tensor
