"""Learning rates over a run."""

from dataclasses import dataclass

from megatron_zpp.settings.flag import NoEffect, Section, flag, flag_that_needs, shared
from megatron_zpp.settings.optimization.optimizer import OptimizerConfig
from megatron_zpp.settings.run import load_flag
from zeropp.settings.schema import Rule, at_most, one_of

LR_STYLES = ("constant", "linear", "cosine", "inverse-square-root", "WSD")
WSD_STYLES = ("exponential", "linear", "cosine", "minus_sqrt")
UNITS = ("iters", "samples", "tokens")
_wsd_flag = flag_that_needs("--lr-decay-style WSD", lambda c: c.schedule.lr_decay_style == "WSD")
_DECAY_IN_TOKENS = NoEffect(
    "--lr-decay-tokens counts, as in Megatron-DeepSpeed",
    when=lambda c: c.schedule.lr_decay_tokens is not None,
)
_NO_WARMUP = NoEffect("there is no warm-up", when=lambda c: not c.schedule.has_warmup)
_ONE_UNIT = "{}: give the length in one unit only"


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
    lr_wsd_decay_style: str = _wsd_flag(
        "exponential", "shape of WSD's last part", choices=WSD_STYLES
    )
    lr_wsd_decay_iters: int | None = _wsd_flag(None, "iterations of WSD's last part", minimum=0)
    lr_wsd_decay_samples: int | None = _wsd_flag(None, "samples of WSD's last part", minimum=0)
    override_opt_param_scheduler: bool = load_flag(
        False,
        "on resuming, these settings replace the checkpoint's",
        aliases=("override-lr-scheduler",),
    )
    use_checkpoint_opt_param_scheduler: bool = load_flag(
        False,
        "on resuming, the checkpoint's settings replace these",
        aliases=("use-checkpoint-lr-scheduler",),
    )

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
