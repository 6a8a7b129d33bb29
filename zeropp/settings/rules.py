"""Which keys of the JSON contradict each other."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


@dataclass(frozen=True, kw_only=True)
class Rule:
    """Keys whose values contradict each other: when, and why."""

    keys: tuple[str, ...]
    broken: Callable[[Any], bool]  # of a ZeroConfig
    why: str


_STAGE = "zero_optimization.stage"
_ZERO = "zero_optimization."
RULES = (
    Rule(
        keys=("fp16.enabled", "bf16.enabled"),
        broken=lambda c: c.fp16.enabled and c.bf16.enabled,
        why="only one of them can be true",
    ),
    Rule(
        keys=(_ZERO + "zero_hpz_partition_size", _STAGE),
        broken=lambda c: c.zero_optimization.zero_hpz_partition_size > 1 and c.stage != 3,
        why="hpZ keeps a second copy of gathered weights, so it needs stage 3",
    ),
    Rule(
        keys=(_ZERO + "zero_quantized_weights", _STAGE),
        broken=lambda c: c.zero_optimization.zero_quantized_weights and c.stage == 0,
        why="stage 0 gathers no weights to quantize; it needs stage 1, 2 or 3",
    ),
    Rule(
        keys=(_ZERO + "zero_quantized_gradients", _STAGE),
        broken=lambda c: c.zero_optimization.zero_quantized_gradients and c.stage == 0,
        why="stage 0 shards no gradients to quantize; it needs stage 1, 2 or 3",
    ),
    Rule(
        keys=(_ZERO + "zero_quantized_nontrainable_weights", _STAGE),
        broken=lambda c: c.zero_optimization.zero_quantized_nontrainable_weights and c.stage == 0,
        why="stage 0 shards no weights; it needs stage 1, 2 or 3",
    ),
    Rule(
        keys=(_ZERO + "offload_optimizer.device", _STAGE),
        broken=lambda c: c.zero_optimization.offload_optimizer.device != "none" and c.stage == 0,
        why="offload moves a rank's shard to the CPU; stage 0 has none, stages 1, 2 and 3 have",
    ),
    Rule(
        keys=(_ZERO + "offload_param.device", _ZERO + "offload_optimizer.ratio"),
        broken=lambda c: c.offloads_weights and c.zero_optimization.offload_optimizer.ratio < 1,
        why="a part of the optimizer on the device needs its weights there",
    ),
    Rule(
        keys=(_ZERO + "zero_quantized_nontrainable_weights", _ZERO + "offload_param.device"),
        broken=lambda c: c.stores_frozen and c.offloads_weights,
        why="frozen weights that are stored quantized stay on the device",
    ),
    Rule(
        keys=("zeropp.delayed_param_update", _ZERO + "offload_optimizer.device"),
        broken=lambda c: c.zeropp.delayed_param_update and not c.offloads_optimizer,
        why="the update that runs beside the next step is the CPU's; it needs the optimizer there",
    ),
    Rule(
        keys=("zeropp.gradient_bits",),
        broken=lambda c: c.zeropp.gradient_bits[0] == 3,
        why="3 bits are for the hop across nodes, as in [8, 3]; twice they cost accuracy",
    ),
    Rule(
        keys=("zeropp.weight_steps", _ZERO + "zero_quantized_weights"),
        broken=lambda c: c.zeropp.weight_steps and not c.zero_optimization.zero_quantized_weights,
        why="the steps are those of INT8 codes, which quantized weights have",
    ),
    Rule(
        keys=("zeropp.weight_steps", "zeropp.weight_bits"),
        broken=lambda c: c.zeropp.weight_steps and c.zeropp.weight_bits != 8,
        why="the steps are those of INT8 codes; it needs 8 bits",
    ),
    Rule(
        keys=("zeropp.weight_steps", _ZERO + "zero_hpz_partition_size"),
        broken=lambda c: c.zeropp.weight_steps and c.zero_optimization.zero_hpz_partition_size == 1,
        why="a node takes steps from the codes that it keeps: it needs hpZ, with the ranks of a "
        "node as the partition",
    ),
    Rule(
        keys=BATCH_KEYS,
        broken=lambda c: (
            (c.train_batch_size or 0)
            % ((c.train_micro_batch_size_per_gpu or 1) * (c.gradient_accumulation_steps or 1))
            != 0
        ),
        why="the first must be the product of the other two and the number of ranks",
    ),
)
