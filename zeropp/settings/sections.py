"""The sections of a DeepSpeed JSON: what each key means here, or why it has no effect.

`key(default, ...)` declares a key that is honoured, `ignored(default, reason)` one that is accepted
and has no effect; `refused={value: reason}` lists values that are errors. The reader, the checks,
the notices and the tests all work from these declarations.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from zeropp.settings.json_keys import JsonSection, NoEffect, ignored, key, needs

BITS = (4, 8, 16)
GRADIENT_BITS = (3, *BITS)
_BLOCKWISE = "FSDP2 gathers and reduces block by block, from one buffer per block"
_ONE_WAY = "there is one way to gather and one to reduce, chosen by the stage"
_PREFETCH = "FSDP2 gathers one block ahead and frees each block after its use"
_FLAT = "all parameters are sharded alike, small ones in their block's buffer"
_CHECKPOINTS = "every checkpoint holds fp32 weights and loads at any number of ranks and any stage"
_SWAPPER = "only NVMe offload has these buffers, and it is not available here"
_NVME = 'offload to NVMe is not available here; "cpu" and "none" are'
_REMOVED = "DeepSpeed removed it in 2026 and it was never part of this project"
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
    nvme_path: str | None = ignored(None, _SWAPPER)
    buffer_count: int = ignored(5, _SWAPPER)
    buffer_size: int = ignored(100_000_000, _SWAPPER)
    max_in_cpu: int = ignored(1_000_000_000, _SWAPPER)
    pin_memory: bool = key(False, no_effect=needs("zero_optimization.offload_param.device"))


@dataclass(frozen=True, kw_only=True)
class OffloadOptimizer(JsonSection):
    path: ClassVar[str] = "zero_optimization.offload_optimizer"

    device: str = key("none", choices=_DEVICES, refused={"nvme": _NVME})
    nvme_path: str | None = ignored(None, _SWAPPER)
    buffer_count: int = ignored(4, _SWAPPER)
    pin_memory: bool = key(False, no_effect=needs("zero_optimization.offload_optimizer.device"))
    pipeline: bool = ignored(False, _SWAPPER)
    pipeline_read: bool = ignored(False, _SWAPPER)
    pipeline_write: bool = ignored(False, _SWAPPER)
    fast_init: bool = ignored(False, _SWAPPER)
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

    reduce_bucket_size: int = ignored(500_000_000, _BLOCKWISE, auto=True)
    allgather_bucket_size: int = ignored(500_000_000, _BLOCKWISE, auto=True)
    contiguous_gradients: bool = ignored(True, _BLOCKWISE)
    reduce_scatter: bool = ignored(True, _ONE_WAY)
    allgather_partitions: bool = ignored(True, _ONE_WAY)
    use_multi_rank_bucket_allreduce: bool = ignored(True, _ONE_WAY)
    legacy_stage1: bool = ignored(False, _ONE_WAY)
    round_robin_gradients: bool = ignored(False, "no gradient is copied to the CPU in turns")
    overlap_comm: bool | None = ignored(
        None, "communication overlaps with computation wherever the device allows it"
    )
    sub_group_size: int = ignored(1_000_000_000, "the optimizer steps parameter by parameter")
    ignore_unused_parameters: bool = ignored(
        True, "parameters without a gradient are always skipped"
    )
    memory_efficient_linear: bool = ignored(True, "PyTorch's own linear layer is used, unpatched")
    load_from_fp32_weights: bool = ignored(True, _CHECKPOINTS)
    elastic_checkpoint: bool = ignored(False, _CHECKPOINTS)
    pipeline_loading_checkpoint: bool = ignored(False, _CHECKPOINTS)
    stage3_gather_16bit_weights_on_model_save: bool = ignored(
        False,
        "checkpoints stay sharded; tools/consolidate.py writes one 16-bit file",
        in_engine="",
    )
    stage3_prefetch_bucket_size: int = ignored(50_000_000, _PREFETCH, auto=True)
    stage3_max_live_parameters: int = ignored(1_000_000_000, _PREFETCH, auto=True)
    stage3_max_reuse_distance: int = ignored(1_000_000_000, _PREFETCH, auto=True)
    stage3_module_granularity_threshold: int = ignored(0, _PREFETCH)
    stage3_use_all_reduce_for_fetch_params: bool = ignored(False, _ONE_WAY)
    stage3_param_persistence_threshold: int = ignored(100_000, _FLAT, auto=True)
    stage3_model_persistence_threshold: int | None = ignored(None, _FLAT, auto=True)
    log_trace_cache_warnings: bool = ignored(False, _PREFETCH)
    override_module_apply: bool = ignored(True, "no method of a module is replaced")
    mics_shard_size: int = key(-1, choices=(-1, 0))  # MiCS: removed from DeepSpeed too
    mics_hierarchical_params_gather: bool = key(False, refused={True: _REMOVED})
    zeropp_loco_param: Mapping | None = ignored(None, _REMOVED, keys=("err_beta", "reset_T"))


@dataclass(frozen=True, kw_only=True)
class Fp16(JsonSection):
    path: ClassVar[str] = "fp16"

    enabled: bool = key(False, auto=True)
    loss_scale: float = key(0.0, minimum=0, auto=True)  # 0 means dynamic
    initial_scale_power: int = key(16, minimum=0, maximum=127, auto=True)
    loss_scale_window: int = key(1000, minimum=1, auto=True)  # steps without overflow
    hysteresis: int = key(2, minimum=1, auto=True)
    min_loss_scale: float = key(1.0, minimum=0, auto=True)
    consecutive_hysteresis: bool = ignored(
        False, "hysteresis returns after loss_scale_window steps without overflow, as in Megatron"
    )
    auto_cast: bool = ignored(False, "FSDP2 casts the inputs by itself", auto=True)
    fp16_master_weights_and_grads: bool = key(
        False, refused={True: "the optimizer always works on fp32 weights and gradients"}
    )


@dataclass(frozen=True, kw_only=True)
class Bf16(JsonSection):
    path: ClassVar[str] = "bf16"

    enabled: bool = key(False, auto=True)
    immediate_grad_update: bool = ignored(True, "gradients accumulate in fp32 as they arrive")


@dataclass(frozen=True, kw_only=True)
class OptimizerParams(JsonSection):
    path: ClassVar[str] = "optimizer.params"

    lr: float | None = key(None, minimum=0, auto=True)
    betas: tuple[float, float] | None = key(None, minimum=0, maximum=1, auto=True)
    eps: float | None = key(None, minimum=0, auto=True)
    weight_decay: float | None = key(None, minimum=0, auto=True)
    adam_w_mode: bool = key(True, refused={False: "only decoupled weight decay is available"})
    bias_correction: bool = key(True, refused={False: "Adam always corrects its bias here"})
    amsgrad: bool = key(False, refused={True: "AMSGrad is not available here"})
    torch_adam: bool = key(False)  # on CPUs
    fused: bool = ignored(False, "the fastest Adam of the device is used")


@dataclass(frozen=True, kw_only=True)
class Optimizer(JsonSection):
    """`Adam` and `AdamW` are the same here, as in DeepSpeed: decoupled weight decay."""

    path: ClassVar[str] = "optimizer"

    type: str | None = key(None, choices=("Adam", "AdamW"))
    params: OptimizerParams = key(OptimizerParams())
    legacy_fusion: bool = ignored(False, "the fastest Adam of the device is used")


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


_RECOMPUTE = "activations are recomputed by torch.utils.checkpoint, which has no such setting"


@dataclass(frozen=True, kw_only=True)
class ActivationCheckpointing(JsonSection):
    path: ClassVar[str] = "activation_checkpointing"

    partition_activations: bool = ignored(
        False,
        "activations are not split over ranks here; --sequence-parallel of pretrain_gpt.py does so",
    )
    cpu_checkpointing: bool = ignored(False, "kept activations stay on the device")
    contiguous_memory_optimization: bool = ignored(False, _RECOMPUTE)
    number_checkpoints: int | None = ignored(
        None, "use --recompute-num-layers", minimum=1, in_engine=_RECOMPUTE
    )
    synchronize_checkpoint_boundary: bool = ignored(False, _RECOMPUTE)
    profile: bool = ignored(False, _RECOMPUTE)


@dataclass(frozen=True, kw_only=True)
class Zeropp(JsonSection):
    """What DeepSpeed's JSON cannot say.

    A node is `ranks_per_node` ranks, as launched by default. `nontrainable_weight_bits`: of frozen
    weights that are stored quantized. `gradient_bits` is [within a node, across nodes].
    `weight_steps`: after an optimizer's step, weights cross nodes as how far each of their codes
    moves, one of `weight_step_levels`, or of as many levels as are needed if that is null; after
    every `weight_step_check_interval` of a unit's messages its copies are compared (0: never).
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
    weight_step_levels: int | None = key(
        None, choices=(3, 5, 9), no_effect=needs("zeropp.weight_steps")
    )
    # A comparison takes less time than a step, which has at most one message of a unit: every 1000
    # messages it costs less than 0.1%. Where latency counts: it is one collective more, of 8 bytes,
    # beside the five or more that a step has for a unit, 1/5. Where memory counts: its sum reads
    # and writes 6 bytes for each code that a rank keeps, where a step has 20 for each of these
    # weights (codes, 16-bit values and fp32 gradients, written and read), 3/10. Where computing
    # counts: the host waits for the sums, so that at worst no gather in forward is hidden by it,
    # 1/3 of a step. All of these together are 0.83 of a step.
    weight_step_check_interval: int = key(1000, minimum=0, no_effect=needs("zeropp.weight_steps"))
    secondary_in_evaluation: bool = key(True)
    reduce_gradients_once: bool = key(
        False, no_effect=NoEffect("stages 0 and 1 do so anyway", when=lambda c: c.stage < 2)
    )
    delayed_param_update: bool = key(False)
    delayed_param_update_warmup: int = key(
        40, minimum=0, no_effect=needs("zeropp.delayed_param_update")
    )
