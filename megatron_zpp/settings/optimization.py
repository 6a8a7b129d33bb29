"""How weights are updated: number formats, optimizers, schedules, and what is computed twice."""

import math
from dataclasses import dataclass
from types import MappingProxyType

from megatron_zpp.settings.capability_flags import CAPABILITIES
from megatron_zpp.settings.flag import SameAs, Section, flags_in, shared
from zeropp.settings import Rule, at_most, declared, one_of

OPTIMIZERS = MappingProxyType(dict(declared("OPTIMIZERS", CAPABILITIES)))  # help by name
UNITS = ("iters", "samples", "tokens")
_ONE_UNIT = "{}: give the length in one unit only"
_flag = flags_in(
    "optimization.toml",
    {
        "--lr-decay-style constant does not decay": lambda c: (
            c.schedule.lr_decay_style == "constant"
        ),
        "the scale that --loss-scale gives is constant": lambda c: (
            c.precision.loss_scale is not None
        ),
        "--lr-decay-tokens counts, as in Megatron-DeepSpeed": lambda c: (
            c.schedule.lr_decay_tokens is not None
        ),
        "there is no warm-up": lambda c: not c.schedule.has_warmup,
        **dict(declared("REASONS", CAPABILITIES)),
    },
)


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig(Section):
    """The number format of forward and backward, and fp16's dynamic loss scale."""

    fp16: bool = _flag(False)
    bf16: bool = _flag(False)
    loss_scale: float | None = _flag(
        None,
        same_as=SameAs(
            "fp16.loss_scale",
            to_flag=lambda scale: scale or None,
            to_json=lambda scale: scale or 0.0,
            key_counts=True,
        ),
    )
    initial_loss_scale: float = _flag(
        2.0**32,
        same_as=SameAs(
            "fp16.initial_scale_power",
            to_flag=lambda power: 2.0**power,
            to_json=lambda scale: (  # None unless the scale is a power of two
                int(power) if (power := math.log2(scale)).is_integer() and power >= 0 else None
            ),
            key_counts=True,
        ),
    )
    min_loss_scale: float = _flag(1.0)
    loss_scale_window: int = _flag(1000)
    hysteresis: int = _flag(2)

    rules = (
        one_of("fp16", "bf16", message="{} contradict: leave one out"),
        at_most("min_loss_scale", "initial_loss_scale", "{1} is below {0}"),
    )

    @property
    def format(self) -> str:
        """Number format of weights and activations in forward and backward, as torch calls it."""
        if self.fp16:
            return "float16"
        return "bfloat16" if self.bf16 else "float32"


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


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig(Section):
    """The learning rate over the run; lengths may be given in iterations, samples or tokens."""

    lr: float = shared(OptimizerConfig, "lr")
    min_lr: float = shared(OptimizerConfig, "min_lr")
    decoupled_lr: float | None = shared(OptimizerConfig, "decoupled_lr")
    decoupled_min_lr: float | None = shared(OptimizerConfig, "decoupled_min_lr")
    lr_decay_style: str = _flag("linear")
    lr_decay_iters: int | None = _flag(None)
    lr_decay_samples: int | None = _flag(None)
    lr_decay_tokens: int | None = _flag(None)
    lr_warmup_fraction: float | None = _flag(None)
    lr_warmup_iters: int = _flag(0)
    lr_warmup_samples: int = _flag(0)
    lr_warmup_tokens: int = _flag(0)
    lr_warmup_init: float = _flag(0.0)
    lr_wsd_decay_style: str = _flag("exponential")
    lr_wsd_decay_iters: int | None = _flag(None)
    lr_wsd_decay_samples: int | None = _flag(None)
    override_opt_param_scheduler: bool = _flag(False)
    use_checkpoint_opt_param_scheduler: bool = _flag(False)

    rules = (
        one_of("lr_decay_iters", "lr_decay_samples", message=_ONE_UNIT),
        one_of(*(f"lr_warmup_{unit}" for unit in ("fraction", *UNITS)), message=_ONE_UNIT),
        one_of("lr_wsd_decay_iters", "lr_wsd_decay_samples", message=_ONE_UNIT),
        Rule(
            ("lr_decay_style", "lr_wsd_decay_iters", "lr_wsd_decay_samples"),
            lambda style, *lengths: style == "WSD" and lengths == (None, None),
            "{} needs --lr-wsd-decay-iters or --lr-wsd-decay-samples: the length of its last part",
        ),
        at_most("lr_warmup_init", "lr", "{} is above {}"),
        at_most("lr_warmup_init", "decoupled_lr", "{} is above {}"),
        one_of(
            "override_opt_param_scheduler",
            "use_checkpoint_opt_param_scheduler",
            message="{} contradict: leave one out",
        ),
    )

    @property
    def has_warmup(self) -> bool:
        """Whether a warm-up was asked for, in any unit."""
        return any(getattr(self, f"lr_warmup_{unit}") for unit in ("fraction", *UNITS))


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
