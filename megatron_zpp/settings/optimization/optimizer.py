"""The optimizer, weight decay and clipping."""

from dataclasses import dataclass
from types import MappingProxyType

from megatron_zpp.settings.capability_flags import CAPABILITIES, no_effect_by_capability
from megatron_zpp.settings.flag import NoEffect, SameAs, Section, flag, needs
from zeropp.settings.capabilities import declared
from zeropp.settings.schema import Rule, at_most

OPTIMIZERS = MappingProxyType(dict(declared("OPTIMIZERS", CAPABILITIES)))  # help by name
NO_DECAY = NoEffect(
    "--lr-decay-style constant does not decay",
    when=lambda c: c.schedule.lr_decay_style == "constant",
)
_NEEDS_DECOUPLED = needs("--decoupled-lr", lambda c: c.optimizer.decoupled_lr is not None)


def _optimizer_of(json_type: str) -> str:
    return "adam" if json_type in ("Adam", "AdamW") else json_type.lower()


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig(Section):
    """AdamW and gradient clipping."""

    optimizer: str = flag(
        "adam",
        ", or ".join(("the optimizer: Adam with decoupled weight decay", *OPTIMIZERS.values())),
        choices=("adam", *OPTIMIZERS),
        synonyms=dict.fromkeys(("adamw", "fusedadam", "fusedadamw"), "adam")
        | dict(declared("SYNONYMS", CAPABILITIES)),
        same_as=SameAs("optimizer.type", to_flag=_optimizer_of, to_json=str.capitalize),
    )
    lr: float = flag(3e-4, "largest learning rate", minimum=0, same_as="optimizer.params.lr")
    min_lr: float = flag(
        0.0, "smallest learning rate after the decay", minimum=0, no_effect=NO_DECAY
    )
    decoupled_lr: float | None = flag(
        None,
        "--lr of the token embedding and the output layer",
        minimum=0,
        no_effect=no_effect_by_capability("decoupled_lr"),
    )
    decoupled_min_lr: float | None = flag(
        None,
        "--min-lr of the token embedding and the output layer",
        minimum=0,
        no_effect=(_NEEDS_DECOUPLED, NO_DECAY),
    )
    weight_decay: float = flag(
        0.01,
        "decoupled weight decay of matrices",
        minimum=0,
        same_as="optimizer.params.weight_decay",
    )
    no_weight_decay_cond_type: str | None = flag(
        None,
        "apply weight decay to the gains of query and key normalizations, as to matrices",
        choices=("apply_wd_to_qk_layernorm",),
        shorthands={"apply-wd-to-qk-layernorm": "apply_wd_to_qk_layernorm"},
        no_effect=needs("--qk-layernorm", lambda c: c.model.qk_layernorm),
    )
    start_weight_decay: float | None = flag(
        None, "weight decay at the start of its schedule", minimum=0
    )
    end_weight_decay: float | None = flag(
        None, "weight decay at the end of its schedule", minimum=0
    )
    weight_decay_incr_style: str = flag(
        "constant", "how the weight decay grows", choices=("constant", "linear", "cosine")
    )
    clip_grad: float = flag(
        1.0, "largest global gradient norm; 0: no clipping", minimum=0, same_as="gradient_clipping"
    )
    adam_beta1: float = flag(
        0.9,
        "decay of the first moment",
        minimum=0,
        below=1,
        same_as=SameAs("optimizer.params.betas", index=0),
    )
    adam_beta2: float = flag(
        0.999,
        "decay of the second moment",
        minimum=0,
        below=1,
        same_as=SameAs("optimizer.params.betas", index=1),
    )
    adam_eps: float = flag(
        1e-8, "added to the denominator of the update", above=0, same_as="optimizer.params.eps"
    )
    cpu_torch_adam: bool = flag(
        False,
        "on CPUs, use PyTorch's AdamW instead of zeropp's",
        aliases=("use-torch-optimizer-for-cpu-offload",),
        same_as="optimizer.params.torch_adam",
    )

    rules = (
        at_most("min_lr", "lr"),
        at_most("decoupled_min_lr", "decoupled_lr"),
        Rule(
            ("min_lr", "decoupled_lr", "decoupled_min_lr"),
            lambda lowest, rate, own: rate is not None and own is None and lowest > rate,
            "{} is larger than {}: lower it, or give --decoupled-min-lr",
        ),
        Rule(
            ("weight_decay_incr_style", "weight_decay", "start_weight_decay", "end_weight_decay"),
            lambda style, decay, *ends: style == "constant" and {*ends} - {None, decay},
            "--start-weight-decay and --end-weight-decay need --weight-decay-incr-style linear or "
            "cosine",
        ),
        Rule(
            ("weight_decay_incr_style", "start_weight_decay", "end_weight_decay"),
            lambda style, *ends: style != "constant" and None in ends,
            "{} needs both --start-weight-decay and --end-weight-decay",
        ),
        at_most("start_weight_decay", "end_weight_decay"),
    )
