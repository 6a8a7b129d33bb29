"""Which activations are computed twice."""

from dataclasses import dataclass

from megatron_zpp.settings.flag import Section, flag, needs
from zeropp.settings.schema import Rule

_NEEDS_FULL = needs(
    "--recompute-granularity full", lambda c: c.recompute.recompute_granularity == "full"
)


@dataclass(frozen=True, kw_only=True)
class RecomputeConfig(Section):
    """Which activations the backward pass computes again instead of keeping them."""

    recompute_granularity: str | None = flag(
        None,
        "full: whole blocks; selective: the attention only",
        choices=("full", "selective"),
        shorthands={
            "checkpoint-activations": "full",
            "deepspeed-activation-checkpointing": "full",
            "recompute-activations": "selective",
        },
    )
    recompute_method: str | None = flag(
        None,
        "uniform: every group of --recompute-num-layers blocks; block: only the first ones",
        choices=("uniform", "block"),
    )
    recompute_num_layers: int = flag(
        1,
        "blocks per group (uniform), or blocks to recompute (block)",
        minimum=1,
        aliases=("checkpoint-num-layers",),
        no_effect=_NEEDS_FULL,
    )

    rules = (
        Rule(
            ("recompute_method", "recompute_granularity"),
            lambda method, granularity: method is not None and granularity != "full",
            "{} needs --recompute-granularity full",
        ),
    )
