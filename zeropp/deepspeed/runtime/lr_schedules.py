"""`deepspeed.runtime.lr_schedules`: the flags of the schedules that the JSON may name.

The names of their parameters are constants, in capitals: WARMUP_MIN_LR is "warmup_min_lr".
"""

import argparse
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from zeropp.deepspeed.names import attribute_of
from zeropp.settings.sections import SCHEDULES

VALID_LR_SCHEDULES = [*SCHEDULES]
LR_RANGE_TEST, ONE_CYCLE, WARMUP_LR, WARMUP_DECAY_LR, WARMUP_COSINE_LR = VALID_LR_SCHEDULES
WARMUP_LOG_RATE, WARMUP_LINEAR_RATE = "log", "linear"
_PARAMETERS = tuple(dict.fromkeys(name for names in SCHEDULES.values() for name in names))
_SWITCHES = ("lr_range_test_staircase", "cycle_momentum")
_HIGHEST = MappingProxyType(  # or only rate of a schedule; a cosine takes the optimizer's
    {
        LR_RANGE_TEST: "lr_range_test_min_lr",
        ONE_CYCLE: "cycle_max_lr",
        WARMUP_LR: "warmup_max_lr",
        WARMUP_DECAY_LR: "warmup_max_lr",
    }
)
_DEFAULTS = MappingProxyType(  # of flags; where there is none, the schedule has its own
    {
        "lr_range_test_min_lr": 1e-3,
        "cycle_min_lr": 0.01,
        "cycle_max_lr": 0.1,
        "warmup_max_lr": 1e-3,
    }
)


def add_tuning_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add `--lr_schedule` and a flag for each parameter of a schedule; return the parser."""
    group = parser.add_argument_group("learning-rate schedules of the JSON")
    group.add_argument("--lr_schedule", help=f"one of {', '.join(VALID_LR_SCHEDULES)}")
    for name in _PARAMETERS:
        if name in _SWITCHES:
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
    if name == "warmup_type":
        return str
    return int if name.endswith(("_steps", "_size", "_count")) else float


def __getattr__(name: str) -> Any:
    if name.isupper() and name.lower() in _PARAMETERS:
        return name.lower()
    return attribute_of(__name__)(name)
