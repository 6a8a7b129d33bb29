"""Learning rates over a run."""

from dataclasses import dataclass

from megatron_zpp.settings.flag import Section, flags_in, shared
from megatron_zpp.settings.optimization.optimizer import OptimizerConfig
from zeropp.settings.schema import Rule, at_most, one_of

UNITS = ("iters", "samples", "tokens")
_flag = flags_in(
    "optimization/schedule.toml",
    {
        "--lr-decay-tokens counts, as in Megatron-DeepSpeed": lambda c: (
            c.schedule.lr_decay_tokens is not None
        ),
        "there is no warm-up": lambda c: not c.schedule.has_warmup,
    },
)
_ONE_UNIT = "{}: give the length in one unit only"


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
