"""DeepSpeed's warm-up schedules, with the learning rates that DeepSpeed gives.

b = max(steps taken - 1, 0), w = max(warmup_num_steps, 2), T = total_num_steps, lr is the
optimizer's own rate, and the warm-up is g = ln(b + 1) / ln w ("log") or b / w ("linear").

| type           | b < w                              | b >= w                                    |
|----------------|------------------------------------|-------------------------------------------|
| WarmupLR       | min + (max - min) g                | max                                       |
| WarmupDecayLR  | min + (max - min) g                | min + (max - min) max(0, (T - b)/(T - w)) |
| WarmupCosineLR | lr (min_ratio + (1 - min_ratio) g) | lr (cos_min + (1 - cos_min) c)            |

c = (1 + cos(pi p)) / 2 with p = min(1, (b - w + 1) / (T - w)). The first step takes the smallest
rate: min, or 0 for WarmupCosineLR.
"""

import math
from collections.abc import Callable

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from zeropp.errors import InputError
from zeropp.settings.sections import Scheduler, SchedulerParams

DECAY_MAX_LR = 0.001  # DeepSpeed's warmup_max_lr of WarmupDecayLR, where none is given


class WarmupSchedule(LRScheduler):
    """A learning rate for each parameter group as a function `rate(b, lr)`, b as in the table."""

    def __init__(
        self, optimizer: Optimizer, rate: Callable[[int, float], float], first_batch: int = 0
    ) -> None:
        self.rate, self.first_batch = rate, first_batch
        super().__init__(optimizer)

    def get_lr(self) -> list[float]:
        """This step's rates; b = -1 before the first step."""
        b = self.last_epoch - 1 + self.first_batch
        return [self.rate(b, lr) for lr in self.base_lrs]

    def state_dict(self) -> dict:
        """The steps taken; the settings come from the JSON."""
        return {"last_epoch": self.last_epoch}

    def load_state_dict(self, state: dict) -> None:
        self.last_epoch = int(state["last_epoch"])
        self._last_lr = self.get_lr()
        for group, lr in zip(self.optimizer.param_groups, self._last_lr, strict=True):
            group["lr"] = lr


def build_scheduler(optimizer: Optimizer, scheduler: Scheduler) -> WarmupSchedule:
    """The schedule that the JSON names; raises InputError where total_num_steps is needed."""
    params = scheduler.params
    total, warmup = params.total_num_steps, max(2, params.warmup_num_steps)
    if scheduler.type != "WarmupLR" and total is None:
        needed = "scheduler.params.total_num_steps"
        raise InputError(f'scheduler.type = "{scheduler.type}" needs {needed}')
    if scheduler.type == "WarmupCosineLR":
        rate = _cosine(params, warmup, total)
    else:
        rate = _linear(params, warmup, total if scheduler.type == "WarmupDecayLR" else None)
    return WarmupSchedule(optimizer, rate, first_batch=params.last_batch_iteration + 1)


def _linear(
    params: SchedulerParams, warmup: int, total: int | None
) -> Callable[[int, float], float]:
    """WarmupLR, or WarmupDecayLR where there is a total."""

    def rate(b: int, lr: float) -> float:
        low, high = params.warmup_min_lr, params.warmup_max_lr
        if high is None:
            high = lr if total is None else DECAY_MAX_LR
        if b < 0:
            return low
        part = 1.0
        if b < warmup:
            part = _warmup(params, b, warmup)
        elif total is not None:
            part = max(0.0, (total - b) / max(1, total - warmup))
        return low + (high - low) * part

    return rate


def _cosine(params: SchedulerParams, warmup: int, total: int) -> Callable[[int, float], float]:
    def rate(b: int, lr: float) -> float:
        if b < 0:
            return 0.0
        if b < warmup:
            low = params.warmup_min_ratio
            return lr * (low + (1 - low) * _warmup(params, b, warmup))
        progress = min(1.0, (b - warmup + 1) / max(1, total - warmup))
        low = params.cos_min_ratio
        return lr * (low + (1 - low) * (1 + math.cos(math.pi * progress)) / 2)

    return rate


def _warmup(params: SchedulerParams, b: int, warmup: int) -> float:
    return math.log(b + 1) / math.log(warmup) if params.warmup_type == "log" else b / warmup
