"""The bytes of a rank's weights, gradients and optimizer state, on the device and on the host."""

import math
from collections import Counter

from megatron_zpp.planner.parts.planned_run import PlannedRun
from megatron_zpp.planner.parts.planned_unit import FP32_BYTES

WEIGHTS, MOMENTS, GRADIENTS = "weights", "optimizer state", "gradients"
SAVED_COPY = "copy for --async-save"


def initial_bytes(run: PlannedRun) -> Counter:
    """Return what is on the device before a step: weights, and optimizer state if not offloaded."""
    trained, frozen = run.trained, run.frozen
    if not run.offloads:
        return Counter({WEIGHTS: FP32_BYTES * trained + frozen, MOMENTS: moments_bytes(run)})
    masters = _master_bytes(run, trained - sum(run.offloaded_shards), is_separate=False)
    if run.config.zero.offloads_weights and not run.is_cpu:
        return masters
    return Counter({WEIGHTS: run.compute_dtype.itemsize * trained + frozen}) + masters


def moments_bytes(run: PlannedRun) -> int:
    """Return the bytes of the optimizer's state, as Adam's two moments, of this rank's weights."""
    trained = [(unit, spec) for unit in run.plan.units for spec in unit.specs if spec.trainable]
    numbers = 2 * sum(spec.elements for _, spec in trained)
    if run.optimizer is not None:
        has_one = run.optimizer.has_momentum
        numbers -= sum(s.elements for unit, s in trained if has_one(s, is_root=unit.is_root))
    return FP32_BYTES * numbers


def saved_bytes(run: PlannedRun) -> int:
    """Return this rank's part of a checkpoint; at stage 0 ranks with the same weights share it."""
    num_bytes = FP32_BYTES * run.trained
    if not run.config.checkpoint.no_save_optim:
        num_bytes += moments_bytes(run)
    if run.config.zero.placement.frozen_bits is None:  # codes are not saved
        num_bytes += run.frozen
    if run.stage:
        return num_bytes
    parts = sum(unit.elements * run.num_ranks // unit.axis.nodes.num_ranks for unit in run.units)
    return math.ceil(num_bytes * parts / (run.num_ranks * sum(unit.elements for unit in run.units)))


def host_bytes(run: PlannedRun) -> Counter:
    """Return what is offloaded to the host.

    With a GPU, the gradients of later micro-batches have a buffer of their own.
    """
    if not run.offloads:
        return Counter()
    elements = sum(run.offloaded_shards)
    offloaded = _master_bytes(run, elements, is_separate=not run.is_cpu)
    if not run.is_cpu and not run.plan.reduces_once and run.num_micro_batches > 1:
        offloaded[GRADIENTS] += _gradient_bytes(run) * elements
    if run.config.zero.offloads_weights and not run.is_cpu:
        offloaded[WEIGHTS] += run.frozen
    return offloaded


def _gradient_bytes(run: PlannedRun) -> int:
    return FP32_BYTES // (1 if run.config.zero.masters["gradient_type"] == "fp32" else 2)


def _master_bytes(run: PlannedRun, elements: int, *, is_separate: bool) -> Counter:
    """Return the fp32 weights, gradients and moments of an offloaded optimizer.

    elements: of this rank's shards. is_separate: the fp32 weights and the 16-bit weights that are
    sent cannot share memory with the model, as always if updates are delayed.
    """
    width, is_delayed = run.compute_dtype.itemsize, run.config.zero.zeropp.delayed_param_update
    is_16_bit, is_separate = width < FP32_BYTES, is_separate or is_delayed
    weights = FP32_BYTES * (is_16_bit or is_separate) + width * (is_16_bit and is_separate)
    share = elements / run.trained if run.trained else 0.0
    return Counter(
        {
            WEIGHTS: weights * elements,
            MOMENTS: round(share * moments_bytes(run)),
            GRADIENTS: (1 + is_delayed) * _gradient_bytes(run) * elements,
        }
    )
