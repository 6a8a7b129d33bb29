"""`deepspeed.runtime.lr_schedules`: the schedules that the JSON may name."""

from zeropp.settings.sections import SCHEDULES

VALID_LR_SCHEDULES = [*SCHEDULES]
