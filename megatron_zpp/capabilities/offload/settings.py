"""The flags of ZeRO-Offload, each a key of the JSON, and what speaks against a configuration."""

from dataclasses import dataclass

from megatron_zpp.settings.flag import SameAs, Section, flag, flag_that_needs

_ZERO = "zero_optimization"
_optimizer_flag = flag_that_needs("--cpu-optimizer", lambda c: c.zero.offloads_optimizer)


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
    optimizer_offload_fraction: float = _optimizer_flag(
        1.0,
        "share of the optimizer that is on the CPU",
        minimum=0,
        maximum=1,
        same_as=f"{_ZERO}.offload_optimizer.ratio",
    )
    remote_device: str = flag(
        "none",
        "where sharded weights are kept",
        choices=("none", "cpu", "nvme"),
        same_as=f"{_ZERO}.offload_param.device",
    )
    use_pin_memory: bool = _optimizer_flag(
        False,
        "page-locked memory for what is offloaded",
        same_as=f"{_ZERO}.offload_optimizer.pin_memory",
    )


JSON_FLAGS = (OffloadFlags,)
OBSTACLES = {
    'zero_optimization.offload_param.device = "cpu" and '
    'zero_optimization.offload_optimizer.device = "none": weights on the CPU are updated '
    "there: it needs the optimizer on the CPU too (--cpu-optimizer)": (
        lambda c: c.zero.offloads_weights and not c.zero.offloads_optimizer
    )
}
OBSTACLES_TO_A_PLAN = {
    "a plan has no times for an optimizer on the host: leave --cpu-optimizer out "
    "(--dry-run reports its memory)": lambda c: c.zero.offloads_optimizer
}
