"""How long a step takes, as a range, and what its seconds are spent on."""

import math
from dataclasses import dataclass, replace

from megatron_zpp.planner.timing.hardware import (
    FAST,
    SLOW,
    TYPICAL,
    Cluster,
    Rates,
    hardware_table,
)
from megatron_zpp.planner.timing.unit_work import StepWork


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds of a step: the range, and what the typical one consists of.

    The range is that of published runs around their predictions, at the slowest and the fastest
    that links between nodes may be. computing: passes and update of the busiest rank. bubble: what
    it waits for other stages of a pipeline, were the links infinitely fast. across_nodes, in_node:
    what would be saved if these links were infinitely fast, the far ones first. kernels: what
    quantizing and dequantizing take. optimizer: of these, what its products and messages take.
    """

    typical: float
    fastest: float
    slowest: float
    computing: float
    bubble: float
    across_nodes: float
    in_node: float
    kernels: float
    optimizer: float = 0.0


def step_time(work: StepWork, cluster: Cluster) -> StepTime:
    """Return how long a step takes on GPUs of `cluster`."""
    rates = cluster.at(TYPICAL, work.run.compute_dtype)
    residuals = hardware_table()["residuals"]
    slowest, fastest = (
        residuals[level] * work.seconds(replace(rates, far=cluster.far_rate(level)))
        for level in (SLOW, FAST)
    )
    typical = work.seconds(rates)
    near_only = work.seconds(_without_links(rates, near=False))
    no_links = _without_links(rates, near=True)
    kernels_only = work.seconds(no_links)
    passes = work.seconds(no_links, quantizing=False)
    computing = work.busy_seconds(no_links, quantizing=False)
    return StepTime(
        typical=typical,
        fastest=fastest,
        slowest=slowest,
        computing=computing,
        bubble=passes - computing,
        across_nodes=typical - near_only,
        in_node=near_only - kernels_only,
        kernels=kernels_only - passes,
        optimizer=work.optimizer_seconds(rates),
    )


def typical_seconds(work: StepWork, cluster: Cluster) -> float:
    """Return the typical seconds of a step alone."""
    return work.seconds(cluster.at(TYPICAL, work.run.compute_dtype))


def _without_links(rates: Rates, *, near: bool) -> Rates:
    """Return the rates with far links, and near ones if asked for, that take no time."""
    protocols = tuple(
        replace(each, start=0.0, far=0.0, near=0.0) if near else replace(each, far=0.0)
        for each in rates.protocols
    )
    return replace(rates, far=math.inf, near=math.inf if near else rates.near, protocols=protocols)
