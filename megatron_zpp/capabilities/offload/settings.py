"""The flags of ZeRO-Offload, each a key of the JSON, and what speaks against a configuration."""

from dataclasses import dataclass

from megatron_zpp.settings.flag import SameAs, Section, flags_in

_flag = flags_in(
    "flags.toml",
    {"--cpu-optimizer": lambda c: c.zero.offloads_optimizer},
    package=__package__,
)


@dataclass(frozen=True, kw_only=True)
class OffloadFlags(Section):
    """Where the optimizer and the weights are."""

    cpu_optimizer: bool = _flag(
        False,
        same_as=SameAs(
            "zero_optimization.offload_optimizer.device",
            to_flag=lambda device: device == "cpu",
            to_json=lambda is_on: "cpu" if is_on else None,
        ),
    )
    optimizer_offload_fraction: float = _flag(1.0)
    remote_device: str = _flag("none")
    use_pin_memory: bool = _flag(False)


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
