"""Which activations are computed twice."""

from dataclasses import dataclass

from megatron_zpp.settings.flag import Section, flags_in
from zeropp.settings.schema import Rule

_flag = flags_in("optimization/recompute.toml")


@dataclass(frozen=True, kw_only=True)
class RecomputeConfig(Section):
    """Which activations the backward pass computes again instead of keeping them."""

    recompute_granularity: str | None = _flag(
        None,
        shorthands={
            "checkpoint-activations": "full",
            "deepspeed-activation-checkpointing": "full",
            "recompute-activations": "selective",
        },
    )
    recompute_method: str | None = _flag(None)
    recompute_num_layers: int = _flag(1)

    rules = (
        Rule(
            ("recompute_method", "recompute_granularity"),
            lambda method, granularity: method is not None and granularity != "full",
            "{} needs --recompute-granularity full",
        ),
    )
