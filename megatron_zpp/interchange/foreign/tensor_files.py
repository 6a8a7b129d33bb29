"""The tensors of another program's checkpoint by name, each read when it is needed."""

import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from zeropp.errors import InputError

COMMON_STATE = "common_state/shard_0_1"  # what Megatron's ranks share, among the tensors since 0.19
NOT_ASKED_FOR = "it was not asked for (--no-load-optim)"
REMEDY = "; --no-load-optim imports the weights alone"  # ends errors in an optimizer's state
MOMENTUM = "momentum_buffer"  # of Muon, in the state of all programs
NOT_TAKEN = "it is Muon's, whose momentum is not taken over"


class UnmappedStateError(Exception):
    """Why the state of an optimizer cannot be taken over, although it is not damaged."""


@dataclass(frozen=True)
class LazyTensor:
    """A tensor in files: `fact` gives shape and dtype on the meta device, `read` the values."""

    fact: Tensor
    read: Callable[[], Tensor]

    @staticmethod
    def of(tensor: Tensor) -> "LazyTensor":
        """Return a tensor that is in memory, or mapped into it."""
        return LazyTensor(tensor.detach().to("meta"), tensor.detach)

    @staticmethod
    def cat(parts: "list[LazyTensor]", dim: int) -> "LazyTensor":
        """Return the parts one after another along `dim`; raises ValueError if they do not fit."""
        if len(parts) == 1:
            return parts[0]
        try:
            fact = torch.cat([part.fact for part in parts], dim)
        except (RuntimeError, IndexError) as error:
            shapes = ", ".join(str(list(part.fact.shape)) for part in parts)
            raise ValueError(f"parts of shapes {shapes} cannot be joined") from error
        return LazyTensor(fact, lambda: torch.cat([part.read() for part in parts], dim))

    def view(self, shape: torch.Size) -> "LazyTensor":
        """Return the same numbers as a tensor of that shape."""
        return LazyTensor(self.fact.view(shape), lambda: self.read().view(shape))

    def ungridded(self, shape: torch.Size) -> "LazyTensor":
        """Return a tensor of `shape` that is saved as [parts of dim 0, of dim 1, ..., numbers].

        It is cut into equal parts along its dims, and each part is flat. A tensor that has the
        shape already is returned as it is. Raises ValueError if the parts are not of `shape`.
        """
        if self.fact.shape == shape:
            return self
        *parts, numel = self.fact.shape
        sizes = [size // max(number, 1) for size, number in zip(shape, parts, strict=False)]
        if len(parts) != len(shape) or any(map(operator.mod, shape, parts)):
            sizes = []
        if math.prod(sizes) != numel:
            raise ValueError(f"parts of {list(self.fact.shape)} are not of {list(shape)}")
        order = [axis for dim in range(len(shape)) for axis in (dim, len(shape) + dim)]
        return LazyTensor(
            torch.empty(shape, dtype=self.fact.dtype, device="meta"),
            lambda: self.read().view(*parts, *sizes).permute(order).reshape(shape),
        )

    def halves(self) -> "tuple[LazyTensor, LazyTensor]":
        """Return the two halves of the rows."""
        if self.fact.shape[0] % 2:
            raise ValueError(f"shape {list(self.fact.shape)} has no two halves")
        first, second = self.fact.chunk(2)
        return (
            LazyTensor(first, lambda: self.read().chunk(2)[0]),
            LazyTensor(second, lambda: self.read().chunk(2)[1]),
        )


class NamedTensors:
    """Tensors by name, read one at a time; `location` is what errors call them."""

    def __init__(self, location: str, tensors: Mapping[str, LazyTensor]) -> None:
        self.location = location
        self._tensors = dict(tensors)

    def facts(self) -> dict[str, Tensor]:
        """Return every tensor's shape and dtype by name, as tensors on the meta device."""
        return {name: tensor.fact for name, tensor in self._tensors.items()}

    def read(self, name: str) -> Tensor:
        """Return one whole tensor on the CPU; raises InputError if it holds NaN or infinity."""
        tensor = self._tensors[name].read()
        if tensor.numel() and not all(extreme.isfinite() for extreme in tensor.aminmax()):
            raise InputError(f"{self.location}: {name} holds NaN or infinity: it is unusable")
        return tensor


@dataclass(frozen=True, kw_only=True)
class ForeignCheckpoint:
    """What was found in another program's checkpoint, under that program's names of tensors.

    `moments` are Adam's exp_avg and exp_avg_sq, with the weights' names, after `step` updates;
    empty if `without_moments` says why they cannot be taken over. `args` are the program's
    arguments, empty if it does not save them.
    """

    weights: NamedTensors
    moments: Mapping[str, NamedTensors] = field(default_factory=lambda: MappingProxyType({}))
    step: float = 0
    without_moments: str = ""
    iteration: int = 0
    args: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
