"""The flags of ZeRO-Offload, each a key of the JSON, and what speaks against a configuration."""

from dataclasses import dataclass
from typing import Any

from megatron_zpp.settings.flag import SameAs, Section, flag, needs

_ZERO = "zero_optimization"
_NEEDS_OPTIMIZER = needs("--cpu-optimizer", lambda config: config.zero.offloads_optimizer)


@dataclass(frozen=True, kw_only=True)
class OffloadFlags(Section):
    """Where the optimizer and the weights are."""

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
    optimizer_offload_fraction: float = flag(
        1.0,
        "share of the optimizer that is on the CPU",
        minimum=0,
        maximum=1,
        no_effect=_NEEDS_OPTIMIZER,
        same_as=f"{_ZERO}.offload_optimizer.ratio",
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
        no_effect=_NEEDS_OPTIMIZER,
        same_as=f"{_ZERO}.offload_optimizer.pin_memory",
    )


def weights_alone(config: Any) -> str:
    """Refuse weights on the host whose optimizer is not."""
    if config.zero.offloads_optimizer or not config.zero.offloads_weights:
        return ""
    return (
        'zero_optimization.offload_param.device = "cpu" and '
        'zero_optimization.offload_optimizer.device = "none": weights on the CPU are updated '
        "there: it needs the optimizer on the CPU too (--cpu-optimizer)"
    )


def unknown_times(config: Any) -> str:
    """Refuse a plan of steps on the host."""
    if not config.zero.offloads_optimizer:
        return ""
    return (
        "a plan has no times for an optimizer on the host: leave --cpu-optimizer out "
        "(--dry-run reports its memory)"
    )


JSON_FLAGS = (OffloadFlags,)
OBSTACLES = (weights_alone,)
OBSTACLES_TO_A_PLAN = (unknown_times,)
