"""Constants of hardware from the log of a run on it, the `metrics.jsonl` of `pretrain_gpt.py`.

A run within a node gives the share of the peak rate that products reach, a run on several nodes the
share of the links' line rate. Each is the value with which the run's step would have been predicted
as it was measured, and its range is what the log's quartiles give, or 5% if they are closer. No
value leaves its physical limits; one at a limit is reported as such.
"""

import json
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from megatron_zpp.model.flops import TokenFlops
from megatron_zpp.planner.replicas import with_interval
from megatron_zpp.planner.search import Search
from megatron_zpp.planner.timing.hardware import TERA, Cluster, Range
from megatron_zpp.settings.config import Config
from zeropp.errors import InputError

PRODUCT_LIMITS = (0.05, 0.95)  # of the peak rate: no product has reached more
LINK_LIMITS = (0.05, 1.0)  # of the line rate
LEAST_SPREAD = 0.05
SAME_MODEL = 0.01  # relative difference of operations per token
STEPS = 40  # of a bisection


@dataclass(frozen=True, kw_only=True)
class MeasuredRun:
    """A run as its log has it; seconds of a step: lower quartile, median, upper quartile."""

    path: str
    num_ranks: int
    global_batch_size: int
    flops_per_token: float
    seconds: tuple[float, float, float]


def calibrate_by_log(cluster: Cluster, config: Config, vocab_size: int, path: str) -> Cluster:
    """Return `cluster` with the constant that a run of `config` on such hardware gives.

    Raises InputError for a file that is no such log, that of another model, or that of a run which
    the cluster's nodes cannot have held.
    """
    run = read_log(path, config.model.seq_length)
    flops = TokenFlops.of(config.model, config.recompute, vocab_size)
    _require_same_model(run, flops.performed)
    per_node = min(cluster.gpus_per_node, run.num_ranks)
    micro_batch = config.batch.micro_batch_size
    replicas = config.parallel.data_parallel_size(run.num_ranks)
    if run.num_ranks % per_node or run.global_batch_size % (micro_batch * replicas):
        raise InputError(
            f"--calibrate {path}: {run.num_ranks} GPUs took batches of {run.global_batch_size} "
            f"samples, which does not go into nodes of {per_node} GPUs and micro-batches of "
            f"{micro_batch} on {replicas} replicas: give the --gpus-per-node, the parallel sizes "
            "and the --micro-batch-size of that run"
        )
    batch = replace(config.batch, global_batch_size=run.global_batch_size)
    config = replace(config, batch=batch)
    if run.num_ranks == per_node:  # one node has no others, from which it would step apart
        config = replace(config, zero=with_interval(config.zero, 1))
    measured_on = replace(cluster, num_nodes=run.num_ranks // per_node, gpus_per_node=per_node)

    search = Search(config, vocab_size, measured_on)
    planned = search.row(search.space.given).forecast

    is_one_node = measured_on.num_nodes == 1

    def with_constant(cluster: Cluster, constant: Range) -> Cluster:
        if is_one_node:
            return replace(cluster, gpu=replace(cluster.gpu, product_share=constant))
        return replace(cluster, link_share=constant)

    def predict(value: float) -> float:
        return planned.typical(with_constant(measured_on, Range(value, value, value)))

    limits = PRODUCT_LIMITS if is_one_node else LINK_LIMITS
    fast, typical, slow = (_solve(predict, seconds, limits) for seconds in run.seconds)
    constants = Range(
        min(slow, typical * (1 - LEAST_SPREAD)),
        typical,
        min(limits[1], max(fast, typical * (1 + LEAST_SPREAD))),
    )
    what = "products at {:.0%} of the peak" if is_one_node else "links at {:.0%} of the line rate"
    text = f"{what.format(typical)} on {run.num_ranks} GPUs ({path})"
    if typical in limits:
        text += ", AT ITS PHYSICAL LIMIT: something else than this constant decided"
    basis = f"measured here: {text}"
    if "measured" in cluster.basis.split(":")[0]:
        basis = f"{cluster.basis}; {text}"
    elif is_one_node:
        basis += ", of one node; links from the table"
    return replace(with_constant(cluster, constants), basis=basis)


def read_log(path: str, seq_length: int) -> MeasuredRun:
    """Return what a `metrics.jsonl` measured, without its first interval; raises InputError."""
    file = Path(path)
    if not file.is_file():
        raise InputError(f"--calibrate {path}: there is no such file")
    try:
        lines = [json.loads(line) for line in file.read_text("utf-8").splitlines() if line]
        intervals = [line for line in lines if "seconds_per_iteration" in line]
        seconds = [float(line["seconds_per_iteration"]) for line in intervals][1:]
        rates = [float(line["tokens_per_gpu_per_second"]) for line in intervals][1:]
        tflops = [float(line["tflops"]) for line in intervals][1:]
        sizes = {int(line["global_batch_size"]) for line in intervals[1:]}
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"--calibrate {path}: expected the metrics.jsonl that pretrain_gpt.py writes with "
            f"--tensorboard-dir ({error})"
        ) from None
    if len(seconds) < 2 or len(sizes) != 1 or min(*seconds, *rates, *tflops) <= 0:
        raise InputError(
            f"--calibrate {path}: expected at least three log intervals of one batch size, with "
            "times and rates above 0: train longer, or log more often"
        )
    (size,) = sizes
    ranks = [size * seq_length / s / r for s, r in zip(seconds, rates, strict=True)]
    quartiles = statistics.quantiles(seconds, n=4, method="inclusive")
    return MeasuredRun(
        path=path,
        num_ranks=max(1, round(statistics.median(ranks))),
        global_batch_size=size,
        flops_per_token=statistics.median(
            each * TERA / rate for each, rate in zip(tflops, rates, strict=True)
        ),
        seconds=(quartiles[0], quartiles[1], quartiles[2]),
    )


def _require_same_model(run: MeasuredRun, planned: float) -> None:
    """Raise InputError unless a run computed what is planned for a token."""
    if abs(run.flops_per_token / planned - 1) > SAME_MODEL:
        raise InputError(
            f"--calibrate {run.path}: that run computed {run.flops_per_token / 1e9:.3g} billion "
            f"operations for a token, and this model needs {planned / 1e9:.3g}: give the flags of "
            "the run that was measured, recomputation and --seq-length included"
        )


def _solve(predict: Callable[[float], float], seconds: float, limits: tuple[float, float]) -> float:
    """Return the constant with which a step takes so long, or the limit that is nearest."""
    low, high = limits
    if predict(low) <= seconds:
        return low
    if predict(high) >= seconds:
        return high
    for _ in range(STEPS):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if predict(middle) > seconds else (low, middle)
    return math.sqrt(low * high)
