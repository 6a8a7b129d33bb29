"""Flags that set JSON keys and nothing else: their values are in `Config.zero`."""

from dataclasses import dataclass

from megatron_zpp.settings.flag import SameAs, Section, flag, ignored, needs

_ZERO = "zero_optimization"
_RECOMPUTE = "activation_checkpointing"


@dataclass(frozen=True, kw_only=True)
class ZeroFlags(Section):
    """ZeRO: the DeepSpeed JSON, and what Megatron-DeepSpeed's flags say of its keys."""

    deepspeed_config: str | None = flag(None, "the DeepSpeed-style JSON")
    zero_stage: int | None = flag(
        None,
        "ZeRO stage: 0 replicas, 1 optimizer, 2 + gradients, 3 + weights sharded (default: the "
        "JSON's, else 0)",
        minimum=0,
        maximum=3,
        same_as=f"{_ZERO}.stage",
    )
    use_distributed_optimizer: bool = flag(
        False, "shard the optimizer: ZeRO stage 1 if no stage is given"
    )
    cpu_optimizer: bool = flag(
        False,
        "optimizer state and step on the CPU",
        aliases=("optimizer-cpu-offload",),
        same_as=SameAs(
            f"{_ZERO}.offload_optimizer.device",
            to_flag=lambda device: device == "cpu",
            to_json=lambda is_on: "cpu" if is_on else None,
        ),
    )
    remote_device: str = flag(
        "none",
        "where sharded weights are kept",
        choices=("none", "cpu", "nvme"),
        same_as=f"{_ZERO}.offload_param.device",
    )
    use_pin_memory: bool = flag(
        False,
        "page-locked memory for what is offloaded",
        no_effect=needs("--cpu-optimizer", lambda config: config.zero.offloads_optimizer),
        same_as=f"{_ZERO}.offload_optimizer.pin_memory",
    )
    deepspeed: bool = ignored(False, "ZeRO is built in; --zero-stage or the JSON sets it up")
    zero_reduce_scatter: bool = flag(False, same_as=f"{_ZERO}.reduce_scatter")
    zero_contigious_gradients: bool = flag(
        False, aliases=("zero-contiguous-gradients",), same_as=f"{_ZERO}.contiguous_gradients"
    )
    zero_reduce_bucket_size: int = flag(0, minimum=0, same_as=f"{_ZERO}.reduce_bucket_size")
    zero_allgather_bucket_size: int = flag(0, minimum=0, same_as=f"{_ZERO}.allgather_bucket_size")
    partition_activations: bool = flag(False, same_as=f"{_RECOMPUTE}.partition_activations")
    contigious_checkpointing: bool = flag(
        False,
        aliases=("contiguous-checkpointing",),
        same_as=f"{_RECOMPUTE}.contiguous_memory_optimization",
    )
    checkpoint_in_cpu: bool = flag(False, same_as=f"{_RECOMPUTE}.cpu_checkpointing")
    synchronize_each_layer: bool = flag(
        False, same_as=f"{_RECOMPUTE}.synchronize_checkpoint_boundary"
    )
    profile_backward: bool = flag(False, same_as=f"{_RECOMPUTE}.profile")
