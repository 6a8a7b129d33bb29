"""`deepspeed.runtime.lr_schedules`: the schedules that the JSON may name, and its keys for them."""

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
