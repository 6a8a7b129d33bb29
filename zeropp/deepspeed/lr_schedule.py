"""DeepSpeed's schedules, with the learning rates that DeepSpeed gives.

b is the batch of the last step, from 0, and -1 before the first; w = max(warmup_num_steps, 2),
T = total_num_steps, lr is the optimizer's own rate, and the warm-up is g = ln(b + 1) / ln w ("log")
or b / w ("linear").

| type           | b < w                              | b >= w                                    |
|----------------|------------------------------------|-------------------------------------------|
| WarmupLR       | min + (max - min) g                | max                                       |
| WarmupDecayLR  | min + (max - min) g                | min + (max - min) max(0, (T - b)/(T - w)) |
| WarmupCosineLR | lr (min_ratio + (1 - min_ratio) g) | lr (cos_min + (1 - cos_min) c)            |

c = (1 + cos(pi p)) / 2 with p = min(1, (b - w + 1) / (T - w)). The first step takes the smallest
rate: min, or 0 for WarmupCosineLR.

LRRangeTest: min (1 + rate i), i = (b + 1) / size, rounded down with `staircase`.
OneCycle: from min to max in the first steps and back in the second ones, then min / (1 + decay d)
with d the number of decay steps, of decay_step_size batches each; Adam's beta1 moves the other way.
Source: L. N. Smith, arXiv:1803.09820.
"""

import math
from collections.abc import Sequence

import torch
from torch.optim import Optimizer

from zeropp.errors import InputError
from zeropp.settings.sections import Scheduler

Rates = float | Sequence[float]  # one for all parameter groups, or one each
BETA2 = 0.99  # that DeepSpeed gives Adam beside a cycled beta1


class Schedule:
    """Sets the rate of each parameter group when it is made, and after each batch by `step`."""

    def __init__(self, optimizer: Optimizer, last_batch_iteration: int = -1) -> None:
        self.optimizer, self.last_batch_iteration = optimizer, last_batch_iteration
        self._first = last_batch_iteration + 1
        self._set()

    @property
    def last_epoch(self) -> int:
        """How many steps were taken, by the name that PyTorch's schedules have for it."""
        return self.last_batch_iteration + 1 - self._first

    def rate(self, b: int, group: int) -> float:
        """Return the rate of a parameter group after batch `b`."""
        raise NotImplementedError

    def get_lr(self) -> list[float]:
        """Return the rates of the next step, one for each parameter group."""
        groups = range(len(self.optimizer.param_groups))
        return [self.rate(self.last_batch_iteration, group) for group in groups]

    def get_last_lr(self) -> list[float]:
        """Return the rates that were set last."""
        return self._last_lr

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Count a batch, or go to that batch, and set the rates."""
        if last_batch_iteration is None:
            last_batch_iteration = self.last_batch_iteration + 1
        self.last_batch_iteration = last_batch_iteration
        self._set()

    def state_dict(self) -> dict[str, int]:
        """Return the number of the last batch; the settings come from the configuration."""
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go to a saved batch, and set the rates. Earlier versions counted steps."""
        if "last_epoch" in state:
            state = {"last_batch_iteration": state["last_epoch"] - 1 + self._first}
        self.last_batch_iteration = state["last_batch_iteration"]
        self._set()

    def _set(self) -> None:
        self._last_lr = self.get_lr()
        for group, lr in zip(self.optimizer.param_groups, self._last_lr, strict=True):
            if isinstance(group["lr"], torch.Tensor):  # which a captured graph may read
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr

    def _for_groups(self, optimizer: Optimizer, rates: Rates, name: str) -> list[float]:
        """Return a rate for each parameter group; raise InputError for another number of them."""
        groups = len(optimizer.param_groups)
        if not isinstance(rates, Sequence):
            return [rates] * groups
        if len(rates) != groups:
            raise InputError(f"{name} has {len(rates)} values for {groups} parameter groups")
        return [*rates]


class _Warmup(Schedule):
    """What the three schedules with a warm-up share."""

    def _prepare(self, warmup_num_steps: int, warmup_type: str) -> None:
        is_number = isinstance(warmup_num_steps, int) and warmup_num_steps >= 0
        if not is_number or warmup_type not in ("log", "linear"):
            raise InputError(
                f"warmup_num_steps = {warmup_num_steps}, warmup_type = {warmup_type!r}: expected a "
                'number of steps, and "log" or "linear"'
            )
        self.warmup_num_steps, self.warmup_type = max(2, warmup_num_steps), warmup_type

    def _warmup(self, b: int) -> float:
        steps = self.warmup_num_steps
        return math.log(b + 1) / math.log(steps) if self.warmup_type == "log" else b / steps


class WarmupLR(_Warmup):
    """From `warmup_min_lr` to `warmup_max_lr`, by default the optimizer's rate, and there."""

    def __init__(
        self,
        optimizer: Optimizer,
        warmup_min_lr: Rates = 0.0,
        warmup_max_lr: Rates | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        if warmup_max_lr is None:
            warmup_max_lr = [float(group["lr"]) for group in optimizer.param_groups]
        self._prepare(warmup_num_steps, warmup_type)
        self.min_lrs = self._for_groups(optimizer, warmup_min_lr, "warmup_min_lr")
        self.max_lrs = self._for_groups(optimizer, warmup_max_lr, "warmup_max_lr")
        super().__init__(optimizer, last_batch_iteration)

    def rate(self, b: int, group: int) -> float:
        low, high = self.min_lrs[group], self.max_lrs[group]
        if b < 0:
            return low
        part = self._warmup(b) if b < self.warmup_num_steps else self._after(b)
        return low + (high - low) * part

    def _after(self, b: int) -> float:
        return 1.0


class WarmupDecayLR(WarmupLR):
    """As `WarmupLR`, then down to `warmup_min_lr` in a line, until `total_num_steps`."""

    def __init__(
        self,
        optimizer: Optimizer,
        total_num_steps: int,
        warmup_min_lr: Rates = 0.0,
        warmup_max_lr: Rates = 0.001,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self.total_num_steps = total_num_steps
        super().__init__(
            optimizer,
            warmup_min_lr,
            warmup_max_lr,
            warmup_num_steps,
            warmup_type,
            last_batch_iteration,
        )

    def _after(self, b: int) -> float:
        length = max(1, self.total_num_steps - self.warmup_num_steps)
        return max(0.0, (self.total_num_steps - b) / length)


class WarmupCosineLR(_Warmup):
    """A share of the optimizer's rate: from `warmup_min_ratio` to 1, then by a cosine down."""

    def __init__(
        self,
        optimizer: Optimizer,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 0.0001,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self._prepare(warmup_num_steps, warmup_type)
        self.total_num_steps = total_num_steps
        self.warmup_min_ratio, self.cos_min_ratio = warmup_min_ratio, cos_min_ratio
        self.org_lrs = [float(group["lr"]) for group in optimizer.param_groups]
        super().__init__(optimizer, last_batch_iteration)

    def rate(self, b: int, group: int) -> float:
        return self.org_lrs[group] * self._ratio(b)

    def get_lr_ratio(self) -> float:
        """Return the share of the optimizer's rate that the next step takes."""
        return self._ratio(self.last_batch_iteration)

    def _ratio(self, b: int) -> float:
        if b < 0:
            return 0.0
        if b < self.warmup_num_steps:
            return self.warmup_min_ratio + (1 - self.warmup_min_ratio) * self._warmup(b)
        length = max(1, self.total_num_steps - self.warmup_num_steps)
        progress = min(1.0, (b - self.warmup_num_steps + 1) / length)
        cosine = (1 + math.cos(math.pi * progress)) / 2
        return self.cos_min_ratio + (1 - self.cos_min_ratio) * cosine


class LRRangeTest(Schedule):
    """A rate that grows all the time, to see from which one on training diverges."""

    def __init__(
        self,
        optimizer: Optimizer,
        lr_range_test_min_lr: Rates = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
        last_batch_iteration: int = -1,
    ) -> None:
        if lr_range_test_step_size < 1:
            raise InputError(f"lr_range_test_step_size = {lr_range_test_step_size}: expected 1 up")
        self.min_lr = self._for_groups(optimizer, lr_range_test_min_lr, "lr_range_test_min_lr")
        self.step_size, self.step_rate = lr_range_test_step_size, lr_range_test_step_rate
        self.staircase = lr_range_test_staircase
        super().__init__(optimizer, last_batch_iteration)

    def rate(self, b: int, group: int) -> float:
        interval = (b + 1) / self.step_size
        if self.staircase:
            interval = math.floor(interval)
        return self.min_lr[group] * (1 + self.step_rate * interval)


class OneCycle(Schedule):
    """One cycle of the rate between two bounds, then a decay; Adam's beta1 in the other direction.

    With stairs the rate moves in that many steps in a half of the cycle. Without Adam's betas,
    nothing but the rate is cycled.
    """

    def __init__(  # noqa: PLR0917  (DeepSpeed's arguments)
        self,
        optimizer: Optimizer,
        cycle_min_lr: Rates,
        cycle_max_lr: Rates,
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: int = 2000,
        cycle_second_step_size: int | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: int = 0,
        cycle_momentum: bool = True,
        cycle_min_mom: Rates = 0.8,
        cycle_max_mom: Rates = 0.9,
        decay_mom_rate: float = 0.0,
        last_batch_iteration: int = -1,
    ) -> None:
        second = cycle_first_step_size if cycle_second_step_size is None else cycle_second_step_size
        if cycle_first_step_size < 1 or second < 0:
            raise InputError(
                f"cycle_first_step_size = {cycle_first_step_size} and cycle_second_step_size = "
                f"{second}: expected at least 1 and 0"
            )
        self.first_step_size, self.second_step_size = cycle_first_step_size, second
        self.total_size = cycle_first_step_size + second
        stairs = cycle_second_stair_count
        self.stairs = cycle_first_stair_count, cycle_first_stair_count if stairs is None else stairs
        self.decay_step_size = decay_step_size
        self.decay_lr_rate, self.decay_mom_rate = decay_lr_rate, decay_mom_rate
        self.min_lrs = self._for_groups(optimizer, cycle_min_lr, "cycle_min_lr")
        self.max_lrs = self._for_groups(optimizer, cycle_max_lr, "cycle_max_lr")
        self.min_moms = self._for_groups(optimizer, cycle_min_mom, "cycle_min_mom")
        self.max_moms = self._for_groups(optimizer, cycle_max_mom, "cycle_max_mom")
        self.cycle_momentum = cycle_momentum and "betas" in optimizer.defaults
        super().__init__(optimizer, last_batch_iteration)
        if self.cycle_momentum and last_batch_iteration == -1:
            for group, low in zip(optimizer.param_groups, self.min_moms, strict=True):
                group["betas"] = (low, BETA2)  # in the first step, as in DeepSpeed

    def rate(self, b: int, group: int) -> float:
        low, high = self.min_lrs[group], self.max_lrs[group]
        if b < self.total_size:
            return low + (high - low) * self._position(b)
        return low / (1 + self.decay_lr_rate * self._decay_steps(b))

    def get_mom(self) -> list[tuple[float, float]] | None:
        """Return the betas of the next step, one pair for each parameter group."""
        if not self.cycle_momentum:
            return None
        b = self.last_batch_iteration
        if b < self.total_size:
            position = self._position(b)
            pairs = zip(self.min_moms, self.max_moms, strict=True)
            return [(high - (high - low) * position, BETA2) for low, high in pairs]
        growth = 1 + self.decay_mom_rate * self._decay_steps(b)
        return [(high * growth, BETA2) for high in self.max_moms]

    def _set(self) -> None:
        super()._set()
        for group, betas in zip(self.optimizer.param_groups, self.get_mom() or (), strict=False):
            group["betas"] = betas

    def _position(self, b: int) -> float:
        """Where the batch after `b` is between the lowest (0) and the highest rate (1)."""
        at, size, stairs = (b + 1) % self.total_size, self.first_step_size, self.stairs[0]
        if at > size:
            at, size, stairs = self.total_size - at, self.second_step_size, self.stairs[1]
        return at * stairs // size / stairs if stairs > 0 else at / size

    def _decay_steps(self, b: int) -> float:
        size = self.decay_step_size
        return (b - self.total_size + 1) / size if size else 0.0


KINDS = (LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR)


def build_scheduler(optimizer: Optimizer, scheduler: Scheduler) -> Schedule:
    """Return the schedule that the JSON names; raises InputError as `Scheduler.arguments` does."""
    (kind,) = (each for each in KINDS if each.__name__ == scheduler.type)
    return kind(optimizer, **scheduler.arguments())
