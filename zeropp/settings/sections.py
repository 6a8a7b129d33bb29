"""The sections of a DeepSpeed JSON, with the keys that are honoured.

`key(default, ...)` declares a key, with the values that it may have. Keys that change nothing are
in `no_effect.toml` and `refused.toml`.
"""

from dataclasses import dataclass
from typing import ClassVar

from zeropp.settings.json_keys import JsonSection, NoEffect, key, needs

BITS = (4, 8, 16)
GRADIENT_BITS = (3, *BITS)
_NVME = 'offload to NVMe is not available here; "cpu" and "none" are'
_DEVICES = ("none", "cpu")


@dataclass(frozen=True, kw_only=True)
class OffloadParam(JsonSection):
    path: ClassVar[str] = "zero_optimization.offload_param"

    device: str = key(
        "none",
        choices=_DEVICES,
        refused={"nvme": _NVME},
        no_effect=NoEffect(
            "only stage 3 shards the weights that would be moved to the CPU",
            when=lambda c: c.stage != 3,
        ),
    )
    pin_memory: bool = key(False, no_effect=needs("zero_optimization.offload_param.device"))


@dataclass(frozen=True, kw_only=True)
class OffloadOptimizer(JsonSection):
    path: ClassVar[str] = "zero_optimization.offload_optimizer"

    device: str = key("none", choices=_DEVICES, refused={"nvme": _NVME})
    pin_memory: bool = key(False, no_effect=needs("zero_optimization.offload_optimizer.device"))
    ratio: float = key(
        1.0, minimum=0, maximum=1, no_effect=needs("zero_optimization.offload_optimizer.device")
    )


@dataclass(frozen=True, kw_only=True)
class ZeroOptimization(JsonSection):
    path: ClassVar[str] = "zero_optimization"

    stage: int = key(0, choices=(0, 1, 2, 3))
    zero_quantized_weights: bool = key(False)
    zero_hpz_partition_size: int = key(1, minimum=1)
    zero_quantized_gradients: bool = key(False)
    zero_quantized_nontrainable_weights: bool = key(False)
    offload_param: OffloadParam = key(OffloadParam())
    offload_optimizer: OffloadOptimizer = key(OffloadOptimizer())
    stage3_gather_16bit_weights_on_model_save: bool = key(False)


@dataclass(frozen=True, kw_only=True)
class Fp16(JsonSection):
    path: ClassVar[str] = "fp16"

    enabled: bool = key(False, auto=True)
    loss_scale: float = key(0.0, minimum=0, auto=True)  # 0 means dynamic
    initial_scale_power: int = key(16, minimum=0, maximum=127, auto=True)
    loss_scale_window: int = key(1000, minimum=1, auto=True)  # steps without overflow
    hysteresis: int = key(2, minimum=1, auto=True)
    min_loss_scale: float = key(1.0, minimum=0, auto=True)


@dataclass(frozen=True, kw_only=True)
class Bf16(JsonSection):
    path: ClassVar[str] = "bf16"

    enabled: bool = key(False, auto=True)


@dataclass(frozen=True, kw_only=True)
class OptimizerParams(JsonSection):
    path: ClassVar[str] = "optimizer.params"

    lr: float | None = key(None, minimum=0, auto=True)
    betas: tuple[float, float] | None = key(None, minimum=0, maximum=1, auto=True)
    eps: float | None = key(None, minimum=0, auto=True)
    weight_decay: float | None = key(None, minimum=0, auto=True)
    torch_adam: bool = key(False)  # on CPUs


@dataclass(frozen=True, kw_only=True)
class Optimizer(JsonSection):
    """`Adam` and `AdamW` are the same here, as in DeepSpeed: decoupled weight decay."""

    path: ClassVar[str] = "optimizer"

    type: str | None = key(None, choices=("Adam", "AdamW"))
    params: OptimizerParams = key(OptimizerParams())


SCHEDULES = ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR")


@dataclass(frozen=True, kw_only=True)
class SchedulerParams(JsonSection):
    path: ClassVar[str] = "scheduler.params"

    warmup_min_lr: float = key(0.0, minimum=0, auto=True)
    warmup_max_lr: float | None = key(None, minimum=0, auto=True)
    warmup_num_steps: int = key(1000, minimum=0, auto=True)
    warmup_type: str = key("log", choices=("log", "linear"), auto=True)
    warmup_min_ratio: float = key(0.0, minimum=0, maximum=1, auto=True)
    cos_min_ratio: float = key(0.0001, minimum=0, maximum=1, auto=True)
    total_num_steps: int | None = key(None, minimum=1, auto=True)
    last_batch_iteration: int = key(-1, minimum=-1)


@dataclass(frozen=True, kw_only=True)
class Scheduler(JsonSection):
    path: ClassVar[str] = "scheduler"

    type: str | None = key(None, choices=SCHEDULES)
    params: SchedulerParams = key(SchedulerParams())


@dataclass(frozen=True, kw_only=True)
class Zeropp(JsonSection):
    """What DeepSpeed's JSON cannot say.

    A node is `ranks_per_node` ranks, as launched by default. `nontrainable_weight_bits`: of frozen
    weights that are stored quantized. `gradient_bits` is [within a node, across nodes].
    `weight_steps`: hpZ's copies are brought up to date after an optimizer's step, by what changes
    in their codes; after every `weight_step_check_interval` of a unit's messages they are compared
    (0: never). `code_messages`: what crosses nodes quantized is coded to its entropy, without loss;
    null, or "auto", where that takes less time.
    `secondary_in_evaluation`: passes in eval() mode keep hpZ's copies, as training does.
    `reduce_gradients_once`: ranks accumulate whole gradients and average them at the end of a step,
    as stages 0 and 1 do. `delayed_param_update`: the host's update runs beside the next step, which
    computes with the weights before it; not in the first `delayed_param_update_warmup` steps.
    """

    path: ClassVar[str] = "zeropp"

    ranks_per_node: int | None = key(None, minimum=1)
    weight_bits: int = key(
        8, choices=BITS, no_effect=needs("zero_optimization.zero_quantized_weights")
    )
    nontrainable_weight_bits: int = key(
        8, choices=(8, 4), no_effect=needs("zero_optimization.zero_quantized_nontrainable_weights")
    )
    gradient_bits: tuple[int, int] = key(
        (8, 4), choices=GRADIENT_BITS, no_effect=needs("zero_optimization.zero_quantized_gradients")
    )
    weight_steps: bool = key(False)
    # A comparison takes less time than a step, which has at most one message of a unit: every 1000
    # messages it costs less than 0.1%. Where latency counts: it is one collective more, of 8 bytes,
    # beside the five or more that a step has for a unit, 1/5. Where memory counts: its sum reads
    # and writes 6 bytes for each code that a rank keeps, where a step has 20 for each of these
    # weights (codes, 16-bit values and fp32 gradients, written and read), 3/10. Where computing
    # counts: the host waits for the sums, so that at worst no gather in forward is hidden by it,
    # 1/3 of a step. All of these together are 0.83 of a step.
    weight_step_check_interval: int = key(1000, minimum=0, no_effect=needs("zeropp.weight_steps"))
    code_messages: bool | None = key(None, auto=True)
    secondary_in_evaluation: bool = key(True)
    reduce_gradients_once: bool = key(
        False, no_effect=NoEffect("stages 0 and 1 do so anyway", when=lambda c: c.stage < 2)
    )
    delayed_param_update: bool = key(False)
    delayed_param_update_warmup: int = key(
        40, minimum=0, no_effect=needs("zeropp.delayed_param_update")
    )
