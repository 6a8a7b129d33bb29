"""Flags that set JSON keys and nothing else: their values are in `Config.zero`."""

from dataclasses import dataclass
from types import MappingProxyType

from megatron_zpp.settings.capability_flags import CAPABILITIES
from megatron_zpp.settings.flag import SameAs, Section, flag
from zeropp.settings.capabilities import declared

STRATEGIES = MappingProxyType(  # of --data-parallel-sharding-strategy, and their ZeRO stages
    {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}
)
_BF16 = ("bf16", "bfp16", "bfloat16")


@dataclass(frozen=True, kw_only=True)
class _ZeroFlags(Section):
    deepspeed_config: str | None = flag(None, "the DeepSpeed-style JSON")
    zero_stage: int | None = flag(
        None,
        "ZeRO stage: 0 replicas, 1 optimizer, 2 + gradients, 3 + weights sharded (default: the "
        "JSON's, else 0)",
        minimum=0,
        maximum=3,
        same_as="zero_optimization.stage",
    )
    use_distributed_optimizer: bool = flag(
        False, "shard the optimizer: ZeRO stage 1 if no stage is given"
    )
    use_megatron_fsdp: bool = flag(
        False, "shard what --data-parallel-sharding-strategy says", aliases=("use-custom-fsdp",)
    )
    data_parallel_sharding_strategy: str = flag(
        "optim_grads_params", "what is sharded: ZeRO stage 0, 1, 2 or 3", choices=tuple(STRATEGIES)
    )
    use_torch_fsdp2: bool = flag(False, "ZeRO stage 3")
    torch_fsdp2_no_reshard_after_forward: bool = flag(
        False, "with --use-torch-fsdp2: weights stay gathered in a step, ZeRO stage 2"
    )
    grad_reduce_in_bf16: bool = flag(
        False,
        "send unquantized gradients in bf16 (default: in the format of the computation)",
        same_as=SameAs(
            "communication_data_type",
            to_flag=lambda name: name in _BF16,
            to_json=lambda is_on: "bf16" if is_on else None,
        ),
    )
    megatron_fsdp_grad_comm_dtype: str = flag(
        "auto",
        "format in which unquantized gradients are sent",
        choices=("auto", "fp32", "fp16", "bf16"),
        same_as=SameAs(
            "communication_data_type",
            to_flag=lambda name: ("bf" if name in _BF16 else "fp") + name[-2:],
            to_json=lambda name: None if name == "auto" else name,
        ),
    )


@dataclass(frozen=True, kw_only=True)
class ZeroFlags(*declared("JSON_FLAGS", CAPABILITIES), _ZeroFlags):
    """ZeRO: the DeepSpeed JSON, and what Megatron-DeepSpeed's flags say of its keys."""
