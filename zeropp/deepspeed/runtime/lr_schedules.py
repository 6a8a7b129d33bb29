"""`deepspeed.runtime.lr_schedules`: the schedules that the JSON may name, its keys and flags."""

import argparse
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from zeropp.optim.lr_schedule import (
    LRRangeTest,
    OneCycle,
    WarmupCosineLR,
    WarmupDecayLR,
    WarmupLR,
)
from zeropp.settings.sections import SCHEDULES

__all__ = [
    "VALID_LR_SCHEDULES",
    "LRRangeTest",
    "OneCycle",
    "WarmupCosineLR",
    "WarmupDecayLR",
    "WarmupLR",
    "add_tuning_arguments",
    "get_config_from_args",
    "get_lr_from_config",
    "override_1cycle_params",
    "override_lr_range_test_params",
]

VALID_LR_SCHEDULES = [*SCHEDULES]
LR_RANGE_TEST, ONE_CYCLE, WARMUP_LR, WARMUP_DECAY_LR, WARMUP_COSINE_LR = VALID_LR_SCHEDULES
WARMUP_LOG_RATE, WARMUP_LINEAR_RATE = "log", "linear"
WARMUP_MIN_LR, WARMUP_MAX_LR, WARMUP_NUM_STEPS, WARMUP_TYPE, TOTAL_NUM_STEPS = SCHEDULES[
    WARMUP_DECAY_LR
]
WARMUP_MIN_RATIO, _, _, COS_MIN_RATIO, _ = SCHEDULES[WARMUP_COSINE_LR]
(
    LR_RANGE_TEST_MIN_LR,
    LR_RANGE_TEST_STEP_SIZE,
    LR_RANGE_TEST_STEP_RATE,
    LR_RANGE_TEST_STAIRCASE,
) = SCHEDULES[LR_RANGE_TEST]
(
    CYCLE_MIN_LR,
    CYCLE_MAX_LR,
    DECAY_LR_RATE,
    CYCLE_FIRST_STEP_SIZE,
    CYCLE_SECOND_STEP_SIZE,
    CYCLE_FIRST_STAIR_COUNT,
    CYCLE_SECOND_STAIR_COUNT,
    DECAY_STEP_SIZE,
    CYCLE_MOMENTUM,
    CYCLE_MIN_MOM,
    CYCLE_MAX_MOM,
    DECAY_MOM_RATE,
) = SCHEDULES[ONE_CYCLE]

_HIGHEST = MappingProxyType(  # or only rate of a schedule; a cosine takes the optimizer's
    {
        LR_RANGE_TEST: LR_RANGE_TEST_MIN_LR,
        ONE_CYCLE: CYCLE_MAX_LR,
        WARMUP_LR: WARMUP_MAX_LR,
        WARMUP_DECAY_LR: WARMUP_MAX_LR,
    }
)
_DEFAULTS = MappingProxyType(  # of flags; where there is none, the schedule has its own
    {LR_RANGE_TEST_MIN_LR: 1e-3, CYCLE_MIN_LR: 0.01, CYCLE_MAX_LR: 0.1, WARMUP_MAX_LR: 1e-3}
)


def add_tuning_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add `--lr_schedule` and a flag for each parameter of a schedule; return the parser."""
    group = parser.add_argument_group("learning-rate schedules of the JSON")
    group.add_argument("--lr_schedule", help=f"one of {', '.join(VALID_LR_SCHEDULES)}")
    for name in dict.fromkeys(name for names in SCHEDULES.values() for name in names):
        if name in (LR_RANGE_TEST_STAIRCASE, CYCLE_MOMENTUM):
            group.add_argument(f"--{name}", action="store_true")
        else:
            group.add_argument(f"--{name}", type=_kind(name), default=_DEFAULTS.get(name))
    return parser


def get_config_from_args(args: argparse.Namespace) -> tuple[dict[str, Any] | None, str | None]:
    """Return the JSON's `scheduler` section that the flags describe, or None and the reason."""
    kind = getattr(args, "lr_schedule", None)
    if kind not in SCHEDULES:
        return None, f"--lr_schedule is {kind}: expected one of {', '.join(VALID_LR_SCHEDULES)}"
    return {"type": kind, "params": _given(args, kind)}, None


def get_lr_from_config(config: Mapping[str, Any]) -> tuple[float | None, str]:
    """Return the highest rate that a `scheduler` section names, or None and the reason."""
    kind, params = config.get("type"), config.get("params", {})
    if _HIGHEST.get(kind) not in params:
        return None, f"the parameters of {kind} name no learning rate"
    return params[_HIGHEST[kind]], ""


def override_lr_range_test_params(args: argparse.Namespace, params: dict[str, Any]) -> None:
    """Write what the flags give for `LRRangeTest` into `params`."""
    params.update(_given(args, LR_RANGE_TEST))


def override_1cycle_params(args: argparse.Namespace, params: dict[str, Any]) -> None:
    """Write what the flags give for `OneCycle` into `params`."""
    params.update(_given(args, ONE_CYCLE))


def _given(args: argparse.Namespace, kind: str) -> dict[str, Any]:
    values = {name: getattr(args, name, None) for name in SCHEDULES[kind]}
    return {name: value for name, value in values.items() if value is not None}


def _kind(name: str) -> type:
    if name == WARMUP_TYPE:
        return str
    return int if name.endswith(("_steps", "_size", "_count")) else float
