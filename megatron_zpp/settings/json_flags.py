"""Flags of ZeRO: the DeepSpeed JSON, and what flags say of its keys."""

from dataclasses import dataclass
from types import MappingProxyType

from megatron_zpp.settings.capability_flags import CAPABILITIES
from megatron_zpp.settings.flag import SameAs, Section, flags_in
from zeropp.settings import declared

STRATEGIES = MappingProxyType(  # of --data-parallel-sharding-strategy, and their ZeRO stages
    {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}
)
_flag = flags_in("json_flags.toml")
_BF16 = ("bf16", "bfp16", "bfloat16")


@dataclass(frozen=True, kw_only=True)
class _ZeroFlags(Section):
    """Flags that set JSON keys and nothing else: their values are in `Config.zero`."""

    deepspeed_config: str | None = _flag(None)
    zero_stage: int | None = _flag(None)
    use_distributed_optimizer: bool = _flag(False)
    use_megatron_fsdp: bool = _flag(False)
    data_parallel_sharding_strategy: str = _flag("optim_grads_params", choices=tuple(STRATEGIES))
    use_torch_fsdp2: bool = _flag(False)
    torch_fsdp2_no_reshard_after_forward: bool = _flag(False)
    grad_reduce_in_bf16: bool = _flag(
        False,
        same_as=SameAs(
            "communication_data_type",
            to_flag=lambda name: name in _BF16,
            to_json=lambda is_on: "bf16" if is_on else None,
        ),
    )
    megatron_fsdp_grad_comm_dtype: str = _flag(
        "auto",
        same_as=SameAs(
            "communication_data_type",
            to_flag=lambda name: ("bf" if name in _BF16 else "fp") + name[-2:],
            to_json=lambda name: None if name == "auto" else name,
        ),
    )


@dataclass(frozen=True, kw_only=True)
class ZeroFlags(*declared("JSON_FLAGS", CAPABILITIES), _ZeroFlags):
    """ZeRO: the DeepSpeed JSON, and what Megatron-DeepSpeed's flags say of its keys."""
