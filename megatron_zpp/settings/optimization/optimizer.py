"""The optimizer, weight decay and clipping."""

from dataclasses import dataclass
from types import MappingProxyType

from megatron_zpp.settings.capability_flags import CAPABILITIES
from megatron_zpp.settings.flag import SameAs, Section, flags_in
from zeropp.settings.capabilities import declared
from zeropp.settings.schema import Rule, at_most

OPTIMIZERS = MappingProxyType(dict(declared("OPTIMIZERS", CAPABILITIES)))  # help by name
_flag = flags_in(
    "optimization/optimizer.toml",
    {
        "--lr-decay-style constant does not decay": lambda c: (
            c.schedule.lr_decay_style == "constant"
        ),
        "LoRA trains neither": lambda c: c.lora.lora_rank > 0,
    },
)


def _optimizer_of(json_type: str) -> str:
    return "adam" if json_type in ("Adam", "AdamW") else json_type.lower()


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig(Section):
    """AdamW and gradient clipping."""

    optimizer: str = _flag(
        "adam",
        ", or ".join(("the optimizer: Adam with decoupled weight decay", *OPTIMIZERS.values())),
        choices=("adam", *OPTIMIZERS),
        synonyms=dict.fromkeys(("adamw", "fusedadam", "fusedadamw"), "adam")
        | dict(declared("SYNONYMS", CAPABILITIES)),
        same_as=SameAs("optimizer.type", to_flag=_optimizer_of, to_json=str.capitalize),
    )
    lr: float = _flag(3e-4)
    min_lr: float = _flag(0.0)
    decoupled_lr: float | None = _flag(None)
    decoupled_min_lr: float | None = _flag(None)
    weight_decay: float = _flag(0.01)
    no_weight_decay_cond_type: str | None = _flag(None)
    start_weight_decay: float | None = _flag(None)
    end_weight_decay: float | None = _flag(None)
    weight_decay_incr_style: str = _flag("constant")
    clip_grad: float = _flag(1.0)
    adam_beta1: float = _flag(0.9)
    adam_beta2: float = _flag(0.999)
    adam_eps: float = _flag(1e-8)
    cpu_torch_adam: bool = _flag(False)

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
