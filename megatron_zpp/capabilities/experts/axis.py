"""The ranks that split the experts of a layer.

In a node they send each other the rows of tokens (zeropp/capabilities/experts/exchange.py).
"""

from dataclasses import dataclass

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from megatron_zpp.model.part import Part
from megatron_zpp.parallel.axes import part_of
from megatron_zpp.parallel.rank_grid import RankGrid
from zeropp.wire.rank_group import RankGroup

NAME = "experts"  # of the axis, among those of a `Part`
AXIS_NAMES = ("expert_data", "expert")


@dataclass(frozen=True, kw_only=True)
class ExpertAxis:
    """The ranks that each have some experts of each layer, as many as the others.

    `group` are those of this rank's node, which send each other rows. Where more than a node splits
    the experts, `across` are the ranks at this one's place in all of these nodes, and `bits` those
    of a number in rows that cross to them (relay.py).

    Parameters are DTensors on the last axis of `mesh`, the ranks that split the experts; its first
    has the ranks with the same ones, over which ZeRO shards them. Planned ranks have no mesh.
    """

    group: RankGroup
    across: RankGroup | None = None
    bits: int = 16
    mesh: DeviceMesh | None = None

    @property
    def size(self) -> int:
        return self.group.size * (1 if self.across is None else self.across.size)

    def part(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return this rank's rows of a parameter without values: those of its experts."""
        mesh = None if self.mesh is None else self.mesh[AXIS_NAMES[1]]
        return part_of(parameter, 0, self.size, mesh)


def axis_of(part: Part) -> ExpertAxis | None:
    """Return the axis over which the experts of a part's layers are split, if they are."""
    return part.axes.get(NAME)


def expert_axis(ranks: RankGrid, size: int, bits: int = 16) -> ExpertAxis | None:
    """Return the axis of `size` consecutive ranks over which experts are split, if they are.

    `bits`: of a number in rows that cross nodes towards experts. All ranks of a run call it.
    """
    if size == 1:
        return None
    first, per_node = ranks.rank // size * size, min(size, ranks.nodes.ranks_per_node)
    first_of_node = ranks.rank // per_node * per_node
    own_node = range(first_of_node, first_of_node + per_node)
    group, across = ranks.rank_group("expert", own_node), None
    if size > per_node:
        place = ranks.rank - first_of_node
        across = ranks.rank_group("expert", range(first + place, first + size, per_node))
    mesh = ranks.stage_mesh(AXIS_NAMES, size)
    return ExpertAxis(group=group, across=across, bits=bits, mesh=mesh)
