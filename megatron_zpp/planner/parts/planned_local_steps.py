"""What nodes that step alone keep and exchange, in a run that is only planned."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from megatron_zpp.settings.config import Config
from zeropp.errors import InputError
from zeropp.optim.local_steps.outer_group import PURPOSE
from zeropp.optim.local_steps.outer_mean import OuterMean
from zeropp.settings.sync_schedule import SyncSchedule
from zeropp.sharding.plan import Plan
from zeropp.wire.route import Nodes

FP32_BYTES = 4
# Buffers of an exchange, in fp32: differences, and what comes back; of the elements that a node
# owns, their sum and what becomes of it; and messages, sent and received.
OF_ALL, OF_OWNED, MESSAGES = 2, 3, 2


@dataclass(frozen=True, kw_only=True)
class PlannedLocalSteps:
    """The nodes of a run which step alone, and the part of it that is one node's.

    config, nodes: of the ranks of one world, with its share of the batch.
    """

    config: Config
    nodes: Nodes
    num_worlds: int

    @classmethod
    def of(cls, config: Config, nodes: Nodes) -> "PlannedLocalSteps | None":
        """Return the plan for all ranks of `nodes`, None if they take each step together.

        Raises InputError for ranks that cannot be cut into several nodes.
        """
        if config.zero.zeropp.sync_every == 1:
            return None
        size = config.parallel.world_ranks(nodes.ranks_per_node)
        num_worlds, rest = divmod(nodes.num_ranks, size)
        if rest or num_worlds == 1:
            raise InputError(
                f"zeropp.sync_every lets nodes step alone, here of {size} ranks, and "
                f"{nodes.num_ranks} ranks are not several of them: give a multiple, or set "
                "zeropp.ranks_per_node"
            )
        batch = config.batch
        share = replace(batch, global_batch_size=batch.global_batch_size // num_worlds)
        return cls(
            config=replace(config, batch=share),
            nodes=Nodes.of(range(size), min(nodes.ranks_per_node, size)),
            num_worlds=num_worlds,
        )

    def __str__(self) -> str:
        settings = self.config.zero.zeropp
        schedule = SyncSchedule.of(
            settings.sync_every, settings.sync_fragments, settings.sync_delay
        )
        bits = settings.sync_bits
        return f"{self.num_worlds} that step alone, exchange {schedule} in {bits} bits"

    def state_bytes(self, plan: Plan) -> tuple[int, int]:
        """Return a rank's agreed weights, and its outer momentum with what rounding has lost."""
        total = sum(self._sizes(plan))
        mean = self._mean(plan)
        unsent = sum(each.nbytes for each in mean.unsent)
        owned = 2 * FP32_BYTES * mean.error.numel()
        return FP32_BYTES * total, owned + unsent

    def buffer_bytes(self, plan: Plan) -> int:
        """Return what an exchange needs on a rank beside, at most."""
        bits = self.config.zero.zeropp.sync_bits
        of_element = FP32_BYTES * (OF_ALL + OF_OWNED / self.num_worlds) + MESSAGES * bits / 8
        return round(of_element * sum(self._sizes(plan)))

    def sent_by_node(self, plan: Plan) -> dict[tuple[str, str], float]:
        """Return the bytes of a node of such ranks per step, before they are coded.

        Where `sync_every` grows, it is that of the last steps.
        """
        _, interval = SyncSchedule.of(self.config.zero.zeropp.sync_every).phases[-1]
        of_rank = self._mean(plan).message_bytes / interval
        return {
            (PURPOSE, "in_node"): 0.0,
            (PURPOSE, "across_nodes"): self.nodes.ranks_per_node * of_rank,
        }

    def _mean(self, plan: Plan) -> OuterMean:
        bits = self.config.zero.zeropp.sync_bits
        group = _Place(node=0, size=self.num_worlds)
        return OuterMean(self._sizes(plan), group, bits, torch.device("meta"))

    def _sizes(self, plan: Plan) -> Sequence[int]:
        """Return the elements of a rank's trained tensors; without shards, its slices of them."""
        parts = plan.num_ranks if plan.stage == 0 else 1
        return [
            -(-spec.elements // parts)
            for unit in plan.units
            for spec in unit.specs
            if spec.trainable
        ]


@dataclass(frozen=True, kw_only=True)
class _Place:
    """This node among all of them, where none exchange."""

    node: int
    size: int
