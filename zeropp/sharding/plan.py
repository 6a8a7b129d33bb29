"""What will be sharded, gathered and sent, unit by unit: a value made before anything is changed.

`zeropp.shard` cuts a model as its plan says; `zeropp.attach` plans for units that exist already,
and a planner of runs for models on the meta device. See docs/adr/0021.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import nn

from zeropp import fsdp_adapter as fsdp
from zeropp.fsdp_adapter import ShardSpec
from zeropp.settings.placement import Placement
from zeropp.settings.zero_config import ZeroConfig
from zeropp.wire.rank_group import Nodes, RankGroup, everyone
from zeropp.wire.route import Route, gradient_route, weight_route


@dataclass(frozen=True, kw_only=True, eq=False)
class DataAxis:
    """The ranks that share units, and the routes of weights and gradients among them.

    `group` has all ranks of the axis, not connected, and global ones where something is to be sent.
    Gradients are the mean over the losses of `num_losses` ranks, which are more than these for
    layers that get the tokens of others too.
    """

    group: RankGroup
    weights: Route
    gradients: Route
    num_losses: int

    @classmethod
    def of(
        cls, config: ZeroConfig, group: RankGroup, *, num_losses: int | None = None
    ) -> "DataAxis":
        """Return the axis of these ranks; `num_losses` is by default their number.

        Raises InputError for an hpZ partition that does not divide them.
        """
        return cls(
            group=group,
            weights=weight_route(config, group.nodes),
            gradients=gradient_route(config, group.nodes),
            num_losses=num_losses or group.size,
        )

    @property
    def nodes(self) -> Nodes:
        return self.group.nodes


@dataclass(frozen=True, kw_only=True)
class UnitPlan:
    """Parameters that are gathered at once, and whose gradients are averaged at once.

    modules: whose forward passes gather it; collectives are set on the first.
    parameters: its own, whole, until it is cut.
    specs: each parameter's part of the buffers, as FSDP2 pads it.
    dtype: in which it is gathered. wire_dtype: in which unquantized gradients are sent.
    casts_inputs: whether FSDP2 casts floating-point inputs to `dtype`.
    is_root: it is called on its own, and stays gathered from its forward to its backward pass.
    is_apart: its modules are inside those of another unit, which has their other parameters.
    regathers: weights are freed after forward and gathered again for backward.
    num_shards: over how many ranks it is cut; 1 where each rank has a replica.
    placement: where and as what its shards are kept.
    mixed_bytes: of one rank's shard, which is gathered as bytes; None unless it has several dtypes.
    """

    specs: tuple[ShardSpec, ...]
    axis: DataAxis
    dtype: torch.dtype
    wire_dtype: torch.dtype
    is_root: bool = False
    is_apart: bool = False
    regathers: bool = False
    casts_inputs: bool = True
    num_shards: int = 1
    placement: Placement = Placement()
    mixed_bytes: int | None = None
    modules: tuple[nn.Module, ...] = field(default=(), compare=False, repr=False)
    parameters: tuple[nn.Parameter, ...] = field(default=(), compare=False, repr=False)

    @property
    def separates_trained(self) -> bool:
        """Whether trained parameters are gathered apart from frozen ones, which never change.

        Those are stored as codes, or a node keeps them for the whole run.
        """
        return self.placement.frozen_bits is not None or self.axis.weights.keeps


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A sharded model's units: those of each root in forward order, and then the root.

    reduces_once: gradients are reduced once in a step, and not in each micro-batch.
    keeps_roots: roots stay gathered from a step's first use of them to the last.
    calls_units: no unit is used but by calling it.
    is_plain: as FSDP2 would do it, with each collective as one ring over all ranks.
    """

    stage: int
    reduces_once: bool
    keeps_roots: bool
    compute_dtype: torch.dtype
    calls_units: bool = False
    units: tuple[UnitPlan, ...] = ()
    is_plain: bool = False

    @cached_property
    def axes(self) -> tuple[DataAxis, ...]:
        """The axes of the units, each once."""
        return tuple(dict.fromkeys(unit.axis for unit in self.units))

    @cached_property
    def axis(self) -> DataAxis | None:
        """The data axis, which has the ranks of all others; None where nothing is sharded."""
        return max(self.axes, key=lambda axis: axis.nodes.num_ranks, default=None)

    @cached_property
    def num_ranks(self) -> int:
        """How many ranks share the units of that axis."""
        return 1 if self.axis is None else self.axis.nodes.num_ranks

    @property
    def has_codes(self) -> bool:
        """Whether frozen weights are stored as codes."""
        return any(spec.packed_bytes for unit in self.units for spec in unit.specs)

    def plain(self, worlds: int = 1, world: int = 0) -> "Plan":
        """Return the plan of the same stage and shapes under plain FSDP2.

        It is over the ranks of `worlds` such axes, one after the other, of which this is one.
        """
        flat: dict[DataAxis, DataAxis] = {}
        for axis in self.axes:
            own = axis.nodes.num_ranks
            nodes = replace(axis.nodes, num_ranks=worlds * own)
            route = Route(nodes=nodes, inner=nodes.num_ranks)
            group = everyone(nodes, world * own + axis.group.position)
            flat[axis] = replace(axis, group=group, weights=route, gradients=route)
        shards = worlds if self.stage else 1  # of what is a shard now
        units = tuple(
            replace(
                unit,
                axis=flat[unit.axis],
                specs=tuple(_without_codes(spec, shards) for spec in unit.specs),
            )
            for unit in self.units
        )
        return replace(self, units=units, is_plain=True)

    def with_specs_of(self, units: Iterable[fsdp.FSDPModule]) -> "Plan":
        """Return the plan with what FSDP2's units hold now."""
        pairs = zip(self.units, units, strict=True)
        planned = (replace(plan, specs=fsdp.own_specs(unit)) for plan, unit in pairs)
        return replace(self, units=tuple(planned))


def _without_codes(spec: ShardSpec, num_shards: int) -> ShardSpec:
    """Return one of so many parts of a spec, each of whole rows, as numbers."""
    row = max(spec.row, 1)
    return replace(spec, packed_bytes=0, elements=-(-spec.elements // (row * num_shards)) * row)
