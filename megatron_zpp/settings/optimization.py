"""How weights are updated: number formats, optimizer, schedules, and what is computed twice."""

import math
from dataclasses import dataclass

from megatron_zpp.settings.flag import NoEffect, SameAs, Section, flag, needs, shared
from megatron_zpp.settings.run import NEEDS_LOAD
from zeropp.settings.schema import Rule, at_most, one_of

LR_STYLES = ("constant", "linear", "cosine", "inverse-square-root", "WSD")
WSD_STYLES = ("exponential", "linear", "cosine", "minus_sqrt")
UNITS = ("iters", "samples", "tokens")
_NEEDS_FULL = needs(
    "--recompute-granularity full", lambda c: c.recompute.recompute_granularity == "full"
)
_NEEDS_FP16 = needs("--fp16", lambda c: c.precision.fp16)
_DYNAMIC_SCALE = (
    _NEEDS_FP16,
    NoEffect(
        "the scale that --loss-scale gives is constant",
        when=lambda c: c.precision.loss_scale is not None,
    ),
)
_NEEDS_WSD = needs("--lr-decay-style WSD", lambda c: c.schedule.lr_decay_style == "WSD")
_NO_DECAY = NoEffect(
    "--lr-decay-style constant does not decay",
    when=lambda c: c.schedule.lr_decay_style == "constant",
)
_DECAY_IN_TOKENS = NoEffect(
    "--lr-decay-tokens counts, as in Megatron-DeepSpeed",
    when=lambda c: c.schedule.lr_decay_tokens is not None,
)
_NEEDS_DECOUPLED = needs("--decoupled-lr", lambda c: c.optimizer.decoupled_lr is not None)
_NO_WARMUP = NoEffect("there is no warm-up", when=lambda c: not c.schedule.has_warmup)
_ONE_UNIT = "{}: give the length in one unit only"


def _power_of_two(scale: float) -> int | None:
    """The exponent of a loss scale that is a power of two; None for any other."""
    power = math.log2(scale)
    return int(power) if power.is_integer() and power >= 0 else None


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


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig(Section):
    """The number format of forward and backward, and fp16's dynamic loss scale."""

    fp16: bool = flag(
        False, "compute in IEEE half precision with loss scaling", same_as="fp16.enabled"
    )
    bf16: bool = flag(False, "compute in bfloat16", same_as="bf16.enabled")
    loss_scale: float | None = flag(
        None,
        "constant loss scale (default: dynamic)",
        above=0,
        no_effect=_NEEDS_FP16,
        same_as=SameAs(
            "fp16.loss_scale",
            to_flag=lambda scale: scale or None,
            to_json=lambda scale: scale or 0.0,
            key_counts=True,
        ),
    )
    initial_loss_scale: float = flag(
        2.0**32,
        "first dynamic loss scale",
        above=0,
        no_effect=_DYNAMIC_SCALE,
        same_as=SameAs(
            "fp16.initial_scale_power",
            to_flag=lambda power: 2.0**power,
            to_json=_power_of_two,
            key_counts=True,
        ),
    )
    min_loss_scale: float = flag(
        1.0,
        "smallest dynamic loss scale",
        above=0,
        no_effect=_DYNAMIC_SCALE,
        same_as=SameAs("fp16.min_loss_scale", key_counts=True),
    )
    loss_scale_window: int = flag(
        1000,
        "clean steps before the scale doubles",
        minimum=1,
        no_effect=_DYNAMIC_SCALE,
        same_as=SameAs("fp16.loss_scale_window", key_counts=True),
    )
    hysteresis: int = flag(
        2,
        "overflows before the scale halves",
        minimum=1,
        no_effect=_DYNAMIC_SCALE,
        same_as=SameAs("fp16.hysteresis", key_counts=True),
    )

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

    optimizer: str = flag(
        "adam",
        "the optimizer: Adam with decoupled weight decay, or Muon for matrices of blocks and Adam "
        "for the rest",
        choices=("adam", "muon"),
        synonyms=dict.fromkeys(("adamw", "fusedadam", "fusedadamw"), "adam")
        | {"dist_muon": "muon"},
        same_as=SameAs("optimizer.type", to_flag=_optimizer_of, to_json=str.capitalize),
    )
    lr: float = flag(3e-4, "largest learning rate", minimum=0, same_as="optimizer.params.lr")
    min_lr: float = flag(
        0.0, "smallest learning rate after the decay", minimum=0, no_effect=_NO_DECAY
    )
    decoupled_lr: float | None = flag(
        None,
        "--lr of the token embedding and the output layer",
        minimum=0,
        no_effect=NoEffect("LoRA trains neither", when=lambda c: c.lora.lora_rank > 0),
    )
    decoupled_min_lr: float | None = flag(
        None,
        "--min-lr of the token embedding and the output layer",
        minimum=0,
        no_effect=(_NEEDS_DECOUPLED, _NO_DECAY),
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


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig(Section):
    """The learning rate over the run; lengths may be given in iterations, samples or tokens."""

    lr: float = shared(OptimizerConfig, "lr")
    min_lr: float = shared(OptimizerConfig, "min_lr")
    decoupled_lr: float | None = shared(OptimizerConfig, "decoupled_lr")
    decoupled_min_lr: float | None = shared(OptimizerConfig, "decoupled_min_lr")
    lr_decay_style: str = flag("linear", "shape of the decay", choices=LR_STYLES)
    lr_decay_iters: int | None = flag(
        None,
        "iterations until the minimum (default: the whole run)",
        minimum=1,
        no_effect=_DECAY_IN_TOKENS,
    )
    lr_decay_samples: int | None = flag(
        None, "samples until the minimum", minimum=1, no_effect=_DECAY_IN_TOKENS
    )
    lr_decay_tokens: int | None = flag(
        None, "tokens until the minimum; replaces the two other lengths", minimum=1
    )
    lr_warmup_fraction: float | None = flag(
        None, "warm-up as a share of the decay", minimum=0, maximum=1, aliases=("warmup",)
    )
    lr_warmup_iters: int = flag(0, "iterations of warm-up", minimum=0)
    lr_warmup_samples: int = flag(0, "samples of warm-up", minimum=0)
    lr_warmup_tokens: int = flag(0, "tokens of warm-up", minimum=0)
    lr_warmup_init: float = flag(
        0.0, "learning rate at the start of the warm-up", minimum=0, no_effect=_NO_WARMUP
    )
    lr_wsd_decay_style: str = flag(
        "exponential", "shape of WSD's last part", choices=WSD_STYLES, no_effect=_NEEDS_WSD
    )
    lr_wsd_decay_iters: int | None = flag(
        None, "iterations of WSD's last part", minimum=1, no_effect=_NEEDS_WSD
    )
    lr_wsd_decay_samples: int | None = flag(
        None, "samples of WSD's last part", minimum=1, no_effect=_NEEDS_WSD
    )
    override_opt_param_scheduler: bool = flag(
        False,
        "on resuming, these settings replace the checkpoint's",
        aliases=("override-lr-scheduler",),
        no_effect=NEEDS_LOAD,
    )
    use_checkpoint_opt_param_scheduler: bool = flag(
        False,
        "on resuming, the checkpoint's settings replace these",
        aliases=("use-checkpoint-lr-scheduler",),
        no_effect=NEEDS_LOAD,
    )

    rules = (
        one_of("lr_decay_iters", "lr_decay_samples", message=_ONE_UNIT),
        one_of(*(f"lr_warmup_{unit}" for unit in ("fraction", *UNITS)), message=_ONE_UNIT),
        one_of("lr_wsd_decay_iters", "lr_wsd_decay_samples", message=_ONE_UNIT),
        Rule(
            ("lr_decay_style", "lr_wsd_decay_iters", "lr_wsd_decay_samples"),
            lambda style, *lengths: style == "WSD" and not any(lengths),
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
