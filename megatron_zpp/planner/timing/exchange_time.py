"""How long nodes that step alone wait for each other's weights.

    differences -> quantized, coded on the host -> owners, who sum -> as much back

A GPU quantizes between its steps. What follows, coding and the links, may run beside later steps.
"""

from dataclasses import dataclass

from megatron_zpp.planner.parts.planned_local_steps import PlannedLocalSteps
from megatron_zpp.planner.parts.planned_run import Places
from megatron_zpp.planner.timing.hardware import GB, Rates, hardware_table
from megatron_zpp.planner.timing.links import exchange

WAYS = 2  # to the owners, and back
FP32_BITS = 32  # which are not coded


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """What nodes exchange every so many steps, beside which they take a share of these steps.

    elements: that a rank has. packed_bytes: of these, in messages. far_bytes: that a node sends.
    """

    interval: int
    fragments: int
    hidden_share: float
    elements: float
    packed_bytes: float
    far_bytes: float
    is_coded: bool

    @classmethod
    def of(cls, planned: PlannedLocalSteps, places: Places) -> "Exchange":
        """Return what the ranks at these places of a pipeline exchange; the slowest decide.

        A node that has ranks of several places sends the mean of them.
        """
        runs = [run for run, count in places for _ in range(count)]
        sent = [planned.exchanged_bytes(run) for run in runs]
        spans_nodes = planned.nodes.num_ranks // len(runs) >= planned.nodes.ranks_per_node
        settings = planned.config.zero.zeropp
        return cls(
            interval=planned.interval,
            fragments=settings.sync_fragments,
            hidden_share=planned.hidden_share,
            elements=max(run.trained for run in runs),
            packed_bytes=max(planned.packed_bytes(run) for run in runs),
            far_bytes=max(sent) if spans_nodes else sum(sent) / len(sent),
            is_coded=settings.sync_bits < FP32_BITS,
        )

    def seconds(self, step: float, rates: Rates, *, quantizing: bool) -> float:
        """Return what it adds to each step, of so many seconds, on average.

        Each fragment is sent and comes back; what does not end beside steps is waited for.
        """
        message = exchange(0.0, self.far_bytes / WAYS / self.fragments)
        away = WAYS * self.fragments * message.hop(rates).seconds
        kernels = 0.0
        if quantizing:
            constants = hardware_table()["exchange"]
            kernels = self.elements * constants["kernel_bytes"] / rates.memory
            away += self.is_coded * self.packed_bytes / (constants["coding_gb_s"] * GB)
        return kernels / self.interval + max(0.0, away / self.interval - self.hidden_share * step)
