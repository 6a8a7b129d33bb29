"""A replica's model, by whatever it is sharded, and its trained weights as this rank has them.

These are flat tensors, wherever they are, and each element is on one rank of the replica. A shard
is its rank's alone. What all ranks of the data axis hold, as at stage 0, is cut into slices, one
for each of them.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from zeropp import fsdp_adapter as fsdp
from zeropp.fsdp_adapter import local_part
from zeropp.optim.sharded_optimizer import sharded
from zeropp.ranks.coordination import gather_objects
from zeropp.sharding.sharding import Sharding

Value = TypeVar("Value")


class HeldModel(Protocol):
    """What an outer step needs to know of a replica's model.

    `trained` are its trained parameters by name. Those that are no shards are the same on all
    ranks of `group`.
    """

    model: nn.Module
    trained: Mapping[str, nn.Parameter]
    group: dist.ProcessGroup | None

    def is_shard(self, parameter: nn.Parameter) -> bool:
        """Whether other ranks of `group` have other parts of a parameter."""

    def changed(self) -> None:
        """Drop what is kept of the weights elsewhere, because they have changed."""

    def gather(self, value: Value) -> list[Value]:
        """Return the values of all ranks that may hold a parameter of the same name."""


def trained_parameters(model: nn.Module, others: Collection[str] = ()) -> dict[str, nn.Parameter]:
    """Return the trained parameters of a model, and those of other names, by their names."""
    named = model.named_parameters()
    return {name: each for name, each in named if each.requires_grad or name in others}


@dataclass(frozen=True)
class OfSharding:
    """A model of `zeropp.shard` in a replica's own process group world."""

    sharding: Sharding

    @property
    def model(self) -> nn.Module:
        return self.sharding.model

    @cached_property
    def trained(self) -> dict[str, nn.Parameter]:
        return trained_parameters(self.model)

    @property
    def group(self) -> dist.ProcessGroup | None:
        return self.sharding.group

    def is_shard(self, parameter: nn.Parameter) -> bool:
        is_split = self.sharding.shards_gradients or self.sharding.grid.has_own_mesh(parameter)
        return is_split and isinstance(parameter, DTensor)

    def changed(self) -> None:
        self.sharding.weights_changed()

    def gather(self, value: Value) -> list[Value]:
        return gather_objects(value)


@dataclass(frozen=True)
class OfModule:
    """A module that others have sharded over `group`, or have left whole.

    `known` names parameters that count though they are frozen. All ranks of the replica have the
    same names. Gathered weights are not used after a write: it raises the versions of tensors,
    which `zeropp.attach` and `zeropp.shard` compare.
    """

    model: nn.Module
    group: dist.ProcessGroup | None
    known: Collection[str] = ()

    @cached_property
    def trained(self) -> dict[str, nn.Parameter]:
        return trained_parameters(self.model, self.known)

    def is_shard(self, parameter: nn.Parameter) -> bool:
        return isinstance(parameter, DTensor) and not all(
            placement.is_replicate() for placement in parameter.placements
        )

    def changed(self) -> None:
        """Do nothing, as versions have changed."""

    def gather(self, value: Value) -> list[Value]:
        return [value]


@dataclass(frozen=True, kw_only=True)
class TrainedWeights:
    """Trained parameters of a replica, and the optimizer that may hold their fp32 masters.

    `names`: those of the parameters; None for all. All ranks of a replica call the same methods.
    """

    model: HeldModel
    optimizer: torch.optim.Optimizer
    names: frozenset[str] | None = None

    @cached_property
    def named(self) -> dict[str, nn.Parameter]:
        """The parameters by their names in the model."""
        trained = self.model.trained.items()
        return {name: each for name, each in trained if self.names is None or name in self.names}

    def read(self) -> list[Tensor]:
        """Return fp32 weights of this rank, flat, which share their memory where they can."""
        return [self._slice(parameter, whole).float() for parameter, whole in self._wholes()]

    @torch.no_grad()
    def write(self, values: Sequence[Tensor]) -> None:
        """Let the weights be these values, in the order of `read`."""
        for (parameter, whole), value in zip(self._wholes(), values, strict=True):
            whole.copy_(self._joined(parameter, value, whole.numel()).view(whole.shape))
        optimizer = sharded(self.optimizer)
        for holder, copy in optimizer.copies.items():
            copy.copy_(local_part(holder))
        if optimizer.masters:
            optimizer.loaded(behind=False)
        self.model.changed()

    def gradients(self) -> list[Tensor]:
        """Return the averaged gradients in the order of `read`, zeros where there are none."""
        sharded(self.optimizer).await_gradients()
        parts = []
        for parameter, whole in self._wholes():
            gradient = self._gradient(parameter)
            part = torch.zeros_like(whole) if gradient is None else local_part(gradient)
            parts.append(self._slice(parameter, part).float())
        return parts

    def have_gradients(self) -> list[bool]:
        """Return which parameters have a gradient, in the order of `named`."""
        return [self._gradient(parameter) is not None for parameter in self.named.values()]

    @torch.no_grad()
    def write_gradients(self, values: Sequence[Tensor], are_wanted: Sequence[bool]) -> None:
        """Let gradients be these values, and those of parameters that are not wanted stay."""
        rows = zip(self._wholes(), values, are_wanted, strict=True)
        for (parameter, whole), value, is_wanted in rows:
            joined = self._joined(parameter, value, whole.numel())
            if not is_wanted:
                continue
            owner = self.masters.get(parameter, parameter)
            if owner.grad is None:
                owner.grad = torch.zeros_like(owner)
            local_part(owner.grad).copy_(joined.view(whole.shape))

    def saved(self, values: Sequence[Tensor]) -> dict[str, Tensor]:
        """Return values in the order of `read` by their parameters' names, as these are sharded."""
        named = zip(self.named.items(), self._wholes(), values, strict=True)
        return {
            name: fsdp.shard_like(parameter, joined)
            for (name, parameter), (_, whole), value in named
            for joined in [self._joined(parameter, value, whole.numel()).view(whole.shape)]
        }

    def loaded(self, named: Mapping[str, Tensor]) -> list[Tensor]:
        """Return, in the order of `read`, what `saved` has returned, with other values."""
        return [
            self._slice(parameter, local_part(named[name]))
            for name, parameter in self.named.items()
        ]

    def _wholes(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Yield each parameter, and this rank's part of its fp32 weights."""
        masters = self.masters
        for parameter in self.named.values():
            yield parameter, local_part(masters.get(parameter, parameter).detach())

    @property
    def masters(self) -> Mapping[nn.Parameter, nn.Parameter]:
        """The fp32 weights that an optimizer holds in the model's place, after its last step."""
        return sharded(self.optimizer).masters

    def _gradient(self, parameter: nn.Parameter) -> Tensor | None:
        return self.masters.get(parameter, parameter).grad

    @property
    def _num_ranks(self) -> int:
        return 1 if self.model.group is None else self.model.group.size()

    def _is_on_all(self, parameter: nn.Parameter) -> bool:
        return self._num_ranks > 1 and not self.model.is_shard(parameter)

    def _slice(self, parameter: nn.Parameter, whole: Tensor) -> Tensor:
        flat = whole.reshape(-1)
        if not self._is_on_all(parameter):
            return flat
        length = self._slice_length(len(flat))
        first = min(dist.get_rank(self.model.group) * length, len(flat))
        return flat[first : first + length]

    def _joined(self, parameter: nn.Parameter, value: Tensor, size: int) -> Tensor:
        """Return what `value` is a slice of, with those of the other ranks."""
        if not self._is_on_all(parameter):
            return value
        length, group = self._slice_length(size), self.model.group
        padded = torch.cat((value, value.new_zeros(length - len(value))))
        slices = [torch.empty_like(padded) for _ in range(group.size())]
        dist.all_gather(slices, padded, group=group)
        return torch.cat(slices)[:size]

    def _slice_length(self, size: int) -> int:
        return -(-size // self._num_ranks)
