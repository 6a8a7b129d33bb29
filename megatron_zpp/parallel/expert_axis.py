"""The ranks that split the experts of a layer.

In a node they send each other the rows of tokens (zeropp/capabilities/experts/exchange.py).
E experts, T tokens times experts of each on a rank, M rows that arrive, H hidden.
"""

from dataclasses import dataclass

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from megatron_zpp.parallel.axes import part_of
from zeropp.capabilities.experts.exchange import Dispatched, combine, dispatch
from zeropp.wire.rank_group import RankGroup

AXIS_NAMES = ("expert_data", "expert")


@dataclass(frozen=True, kw_only=True)
class ExpertAxis:
    """The ranks that each have some experts of each layer, as many as the others.

    `group` are those of this rank's node, which send each other rows. Where more than a node splits
    the experts, `across` are the ranks at this one's place in all of these nodes, and `bits` those
    of a number in rows that cross to them (model/moe/relay.py).

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

    def dispatch(self, rows: Tensor, counts: Tensor) -> Dispatched:
        """Send `rows` [T, H], by expert, of which each expert gets as many as `counts` [E] says.

        E counts the experts of a node.
        """
        return dispatch(rows, counts, self.group)

    def combine(self, rows: Tensor, dispatched: Dispatched) -> Tensor:
        """Return [T, H], in the order of what was dispatched, of what experts made of it [M, H]."""
        return combine(rows, dispatched, self.group)
