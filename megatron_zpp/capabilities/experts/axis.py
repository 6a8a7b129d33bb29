"""The ranks that split the experts of a layer.

In a node they send each other the rows of tokens (zeropp/capabilities/experts/exchange.py).
"""

from dataclasses import dataclass
from math import gcd

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from megatron_zpp.model.part import Part
from megatron_zpp.parallel.axes import part_of
from megatron_zpp.parallel.mesh import RankGrid
from megatron_zpp.settings.config import ModelConfig, ParallelConfig
from zeropp.errors import InputError
from zeropp.wire import Nodes, RankGroup

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


def expert_ranks(model: ModelConfig, parallel: ParallelConfig, stage: int, nodes: Nodes) -> int:
    """Return how many consecutive ranks split the experts of a layer; 1 for a dense model.

    stage: ZeRO's. Raises InputError for a --expert-model-parallel-size that does not fit.
    """
    if not model.has_experts:
        return 1
    size, tensor = parallel.expert_model_parallel_size, parallel.tensor_model_parallel_size
    num_experts, ranks_per_node = model.num_experts, nodes.ranks_per_node
    stage_ranks = nodes.num_ranks // parallel.pipeline_model_parallel_size
    repeats_tokens = tensor > 1 and not parallel.sequence_parallel
    if size is None:
        if repeats_tokens or stage == 0:
            return 1
        most = gcd(num_experts, stage_ranks, ranks_per_node)
        return most if most % tensor == 0 else 1
    shown = f"--expert-model-parallel-size {size}"
    if size > 1 and repeats_tokens:
        raise InputError(
            f"{shown} needs tensor ranks with tokens of their own: add --sequence-parallel "
            "beside --tensor-model-parallel-size, or set 1"
        )
    for number, what in (
        (num_experts, f"the {num_experts} experts of --num-experts"),
        (stage_ranks, f"the {stage_ranks} ranks that share the layers"),
    ):
        if number % size:
            raise InputError(
                f"{shown} does not divide {what}: use {gcd(num_experts, stage_ranks)} or a "
                "divisor of it"
            )
    if ranks_per_node % size and size % ranks_per_node:
        raise InputError(
            f"{shown} is neither a part of a node's {ranks_per_node} ranks nor whole nodes: "
            f"use a divisor or a multiple of {ranks_per_node}"
        )
    if size > 1 and size % tensor:
        raise InputError(
            f"{shown} is not a multiple of --tensor-model-parallel-size {tensor}: the tensor "
            "ranks of a sequence send its tokens to other experts each; use a multiple, or 1"
        )
    return size
