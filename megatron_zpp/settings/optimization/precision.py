"""Number formats, and the loss scale of fp16."""

import math
from dataclasses import dataclass

from megatron_zpp.settings.flag import SameAs, Section, flags_in
from zeropp.settings.schema import at_most, one_of

_flag = flags_in(
    "optimization/precision.toml",
    {"the scale that --loss-scale gives is constant": lambda c: c.precision.loss_scale is not None},
)


def _power_of_two(scale: float) -> int | None:
    """The exponent of a loss scale that is a power of two; None for any other."""
    power = math.log2(scale)
    return int(power) if power.is_integer() and power >= 0 else None


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
            to_json=_power_of_two,
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
