"""Dynamic loss scaling for fp16: as large as gradients allow, halved when they overflow.

Source: Micikevicius et al. 2018, section 3.2, with Megatron's hysteresis.
"""

from dataclasses import dataclass
from operator import attrgetter

from zeropp.errors import InputError
from zeropp.settings.sections import Fp16


@dataclass(kw_only=True)
class LossScaler:
    """The factor the loss is multiplied by before backward, and how it moves.

    Halves after `hysteresis` overflows (not below `min_scale`); doubles after `window` steps in
    a row without one, which also restores the hysteresis. `dynamic=False` keeps it fixed.
    """

    scale: float
    min_scale: float = 1.0
    window: int = 1000
    hysteresis: int = 2
    dynamic: bool = True
    clean_steps: int = 0
    overflows_left: int | None = None

    def __post_init__(self) -> None:
        if self.overflows_left is None:
            self.overflows_left = self.hysteresis

    def update(self, overflow: bool) -> None:
        """Move the scale after a step.

        Raises InputError when gradients overflow at the smallest scale already.
        """
        if not self.dynamic:
            return
        if overflow:
            self._shrink()
        else:
            self._grow()

    def state_dict(self) -> dict:
        """Return what a checkpoint needs to resume the scale exactly."""
        return {
            "scale": self.scale,
            "clean_steps": self.clean_steps,
            "overflows_left": self.overflows_left,
        }

    def load_state_dict(self, state: dict) -> None:
        if self.dynamic:
            self.scale = float(state["scale"])
            self.clean_steps = int(state["clean_steps"])
            self.overflows_left = int(state["overflows_left"])

    def _shrink(self) -> None:
        self.clean_steps = 0
        self.overflows_left -= 1
        if self.overflows_left > 0:
            return
        if self.scale <= self.min_scale:
            raise InputError(
                f"fp16 gradients overflow even at the smallest loss scale ({self.min_scale:g}): "
                "lower the learning rate, lengthen the warm-up, or train with --bf16"
            )
        self.scale = max(self.scale / 2, self.min_scale)

    def _grow(self) -> None:
        self.clean_steps += 1
        if self.clean_steps == self.window:
            self.clean_steps = 0
            self.overflows_left = self.hysteresis
            self.scale *= 2


@dataclass(kw_only=True)
class DeepSpeedLossScaler(LossScaler):
    """Grows as DeepSpeed's scale does: after `window` clean steps, in the first step behind them.

    With a window of 2 that is in clean steps 3, 5 and so on, where Megatron's grows in 2, 4. With
    `consecutive_hysteresis` each clean step restores the hysteresis. It has the attributes of
    DeepSpeed's, too; `cur_iter` counts the steps.
    """

    consecutive_hysteresis: bool = False
    cur_iter: int = 0

    cur_scale = loss_scale = property(attrgetter("scale"))
    scale_window = property(attrgetter("window"))
    dynamic_loss_scale = property(attrgetter("dynamic"))

    def update(self, overflow: bool) -> None:
        """Move the scale after a step, as `LossScaler.update` does."""
        super().update(overflow)
        self.cur_iter += 1

    def _grow(self) -> None:
        if self.consecutive_hysteresis:
            self.overflows_left = self.hysteresis
        if self.clean_steps and self.clean_steps % self.window == 0:
            self.overflows_left = self.hysteresis
            self.scale *= 2
        self.clean_steps += 1


def deepspeed_loss_scaler(fp16: Fp16) -> DeepSpeedLossScaler | None:
    """Return the scaler of the JSON's fp16 section; None if the section is not enabled."""
    if not fp16.enabled:
        return None
    fixed = fp16.loss_scale > 0
    return DeepSpeedLossScaler(
        scale=fp16.loss_scale if fixed else 2.0**fp16.initial_scale_power,
        min_scale=fp16.min_loss_scale,
        window=fp16.loss_scale_window,
        hysteresis=fp16.hysteresis,
        consecutive_hysteresis=fp16.consecutive_hysteresis,
        dynamic=not fixed,
    )
