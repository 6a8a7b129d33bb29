"""Number formats, and the loss scale of fp16."""

import math
from dataclasses import dataclass
from functools import partial

from megatron_zpp.settings.flag import NoEffect, SameAs, Section, flag, needs
from zeropp.settings.schema import at_most, one_of

_NEEDS_FP16 = needs("--fp16", lambda c: c.precision.fp16)
_IS_CONSTANT = NoEffect(
    "the scale that --loss-scale gives is constant",
    when=lambda c: c.precision.loss_scale is not None,
)
_scale_flag = partial(flag, no_effect=(_NEEDS_FP16, _IS_CONSTANT))


def _power_of_two(scale: float) -> int | None:
    """The exponent of a loss scale that is a power of two; None for any other."""
    power = math.log2(scale)
    return int(power) if power.is_integer() and power >= 0 else None


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
    initial_loss_scale: float = _scale_flag(
        2.0**32,
        "first dynamic loss scale",
        above=0,
        same_as=SameAs(
            "fp16.initial_scale_power",
            to_flag=lambda power: 2.0**power,
            to_json=_power_of_two,
            key_counts=True,
        ),
    )
    min_loss_scale: float = _scale_flag(
        1.0,
        "smallest dynamic loss scale",
        above=0,
        same_as=SameAs("fp16.min_loss_scale", key_counts=True),
    )
    loss_scale_window: int = _scale_flag(
        1000,
        "clean steps before the scale doubles",
        minimum=1,
        same_as=SameAs("fp16.loss_scale_window", key_counts=True),
    )
    hysteresis: int = _scale_flag(
        2,
        "overflows before the scale halves",
        minimum=1,
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
