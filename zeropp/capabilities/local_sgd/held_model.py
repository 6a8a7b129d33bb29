"""A replica's model, by whatever it is sharded over the ranks of the replica."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, TypeVar

import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

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
