"""Estimate the peak memory of a rank during a step, by kind, without running it.

The step is simulated (`step_simulation.py`), with activations that are traced on the meta device
(`activations.py`), with balanced routing.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from megatron_zpp.planner.activations import traced
from megatron_zpp.planner.parts.planned_run import Places, PlannedRun, plan_places
from megatron_zpp.planner.replicas import (
    AGREED,
    EXCHANGE,
    OUTER_STATE,
    PlannedReplicas,
    mean_of_nodes,
)
from megatron_zpp.planner.state_memory import (
    GRADIENTS,
    MOMENTS,
    SAVED_COPY,
    WEIGHTS,
    host_bytes,
    saved_bytes,
)
from megatron_zpp.planner.step_simulation import (
    ACTIVATIONS,
    COPIES,
    GATHERED,
    HEAD,
    IN_FLIGHT,
    StepSimulation,
)
from megatron_zpp.settings.config import Config
from zeropp.sharding import Plan
from zeropp.wire import Nodes

KINDS = (
    WEIGHTS, MOMENTS, AGREED, OUTER_STATE, GRADIENTS, GATHERED, COPIES, IN_FLIGHT, ACTIVATIONS,
    HEAD, EXCHANGE, SAVED_COPY,
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Bytes on the device and on the host at the peak of the fullest rank, by kind.

    On a CPU everything is on the host. `run` is that of the rank. `sent` is what a node sends in a
    step, the mean over nodes. `optimizer_flops` are the operations of the busiest rank beside
    element-wise updates, the mean of the steps, None if there are none.
    """

    device: Mapping[str, int]
    host: Mapping[str, int]
    run: PlannedRun
    sent: Mapping[tuple[str, str], float] = field(default_factory=dict)
    optimizer_flops: float | None = None

    @property
    def plan(self) -> Plan:
        """The plan of the rank's part of the model."""
        return self.run.plan

    @property
    def device_bytes(self) -> int:
        return sum(self.device.values())

    @property
    def host_bytes(self) -> int:
        return sum(self.host.values())


def estimate(
    config: Config,
    vocab_size: int,
    nodes: Nodes,
    *,
    is_cpu: bool,
    replicas: PlannedReplicas | None = None,
) -> Estimate:
    """Return the memory that `config` needs on ranks of `nodes`, on CPUs or on GPUs.

    With `replicas` these are the ranks of one of them. Raises InputError for ranks
    that the nodes cannot hold alike, and for an hpZ partition that does not divide them.
    """
    places = plan_places(config, vocab_size, nodes, is_cpu=is_cpu)
    flops = [run.optimizer.flops for run, _ in places if run.optimizer is not None]
    return replace(
        estimate_places(places, replicas),
        sent=mean_of_nodes(places, replicas),
        optimizer_flops=max(flops, default=None),
    )


def estimate_places(places: Places, replicas: PlannedReplicas | None = None) -> Estimate:
    """Return the memory of the rank that needs most."""
    result = _fullest(places)
    if replicas is None:
        return result
    memory = replicas.with_state(result.run, result.device, result.host)
    device, host = map(MappingProxyType, memory)
    return replace(result, device=device, host=host)


def _fullest(places: Places) -> Estimate:
    """Return the estimate of the run that needs most memory.

    Of ranks between the ends of a pipeline with the same kinds of layers, the first holds the most
    micro-batches.
    """
    (first, _), *_ = places
    kinds = first.model.layer_kinds(first.config.recompute.recompute_num_layers)
    chosen: dict[object, PlannedRun] = {}
    for run, _ in places:
        layers = tuple(kinds[layer] for stage in run.stages for layer in stage.layers)
        chosen.setdefault((layers, run.stages[-1].is_last), run)
    return max(
        map(estimate_run, chosen.values()), key=lambda each: each.device_bytes + each.host_bytes
    )


def estimate_run(run: PlannedRun) -> Estimate:
    """Return the memory that a rank of `run` needs."""
    config = run.config
    simulation = StepSimulation(run, [traced(run, stage) for stage in run.stages])
    simulation.run_step()
    device, host = simulation.peak, host_bytes(run)
    for each in run.capabilities:
        device.update(each.memory())
    if config.checkpoint.async_save and config.checkpoint.save:
        host[SAVED_COPY] += saved_bytes(run)
    if run.is_cpu:
        device, host = {}, device + host
    return Estimate(device=MappingProxyType(device), host=MappingProxyType(host), run=run)
