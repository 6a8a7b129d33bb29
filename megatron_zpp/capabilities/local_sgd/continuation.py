"""How replicas that train independently go on from a checkpoint."""

import logging
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from torch import Tensor

from megatron_zpp.checkpoint.training_state import TrainingState
from megatron_zpp.parallel.mesh import Ranks
from megatron_zpp.settings.config import CheckpointConfig, ParallelConfig
from megatron_zpp.settings.parallel import OTHER_SIZES, SIZES
from zeropp.capabilities.local_sgd import LocalSteps, OuterMean
from zeropp.errors import InputError

FP32 = 32  # bits

log = logging.getLogger("megatron_zpp")


def continue_replica(
    replicas: Any,
    read: Mapping[str, Tensor],
    source: Any,
    state: TrainingState | None,
    options: CheckpointConfig,
    parallel: ParallelConfig,
    ranks: Ranks,
) -> None:
    """Go on from a checkpoint that has been loaded, or from the beginning if `state` is None.

    `read` is its state of local SGD, empty if moments are reset. Replicas that have loaded
    different weights then go on with their mean. All replicas call it. Raises InputError on all of
    them if they have loaded different iterations.
    """
    local_steps = replicas.steps
    if replicas.joins_and_leaves:
        _continue_alone(replicas, read, state, options, parallel, ranks)
        return
    iterations = replicas.gather(None if state is None else state.iteration)
    if len(set(iterations)) > 1:
        raise InputError(
            f"--load: replicas have loaded different iterations: "
            f"{', '.join(map(str, iterations))} (None: no checkpoint); all need the same"
        )
    if state is None or not (read or source.is_of_each):
        local_steps.restart()
        return
    if not read:
        _go_on_with_mean(local_steps)
        log.info("replicas go on with the mean of their weights; the outer momentum is reset")
        return
    local_steps.load(read)
    if options.reset_iteration:
        local_steps.end_delay()
    _forget_momentum_of_others(replicas, state, parallel, ranks.num_ranks)


def _forget_momentum_of_others(
    replicas: Any, state: TrainingState, parallel: ParallelConfig, num_ranks: int
) -> None:
    """Reset the outer momentum if its ownership has changed."""
    saved_by = _layout(state.world_size, state.stage, state.configuration["parallel"])
    now = _layout(num_ranks, replicas.stage, asdict(parallel))
    place = state.num_worlds, state.node
    if saved_by == now and (place == (replicas.count, replicas.index) or not state.launch):
        return
    for each in replicas.steps.fragments:
        each.momentum.zero_()
        each.mean.forget()
    log.info(
        "the weights are divided differently over replicas, or over the ranks of a replica: the "
        "outer momentum is reset"
    )


def _continue_alone(
    replicas: Any,
    read: Mapping[str, Tensor],
    state: TrainingState | None,
    options: CheckpointConfig,
    parallel: ParallelConfig,
    ranks: Ranks,
) -> None:
    """Go on as an elastic replica: all initial members have read the same global parameters."""
    local_steps = replicas.steps
    if not read or state is None:
        local_steps.restart()
        return
    local_steps.load(read)
    _forget_momentum_of_others(replicas, state, parallel, ranks.num_ranks)
    if options.no_load_optim:
        local_steps.restart_from_agreed()
        log.info("without moments, replicas go on with the weights after the last outer step")


def _go_on_with_mean(local_steps: LocalSteps) -> None:
    """Give all replicas the means of their weights, formed in fp32, and of their buffers."""
    weights = local_steps.weights.read()
    group = local_steps.group
    mean = OuterMean([len(each) for each in weights], group, FP32, weights[0].device)
    local_steps.weights.write(group.start(lambda: mean.run(weights)).result())
    local_steps.buffers.average()
    group.traffic.take()  # of no step
    local_steps.restart()


def _layout(world_size: int, stage: int, parallel: Mapping[str, Any]) -> tuple:
    """Return what determines which part of the weights each rank of a replica has."""
    return world_size, stage > 0, *(parallel.get(name, 1) for name in (*SIZES, *OTHER_SIZES))
