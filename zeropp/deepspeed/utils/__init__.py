"""`deepspeed.utils`: the logger, and what programs do with an engine's parameters."""

import logging
from typing import Any

from torch.distributed import get_rank, is_initialized

from zeropp.deepspeed.names import attribute_of
from zeropp.deepspeed.utils.tensor_fragment import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_get_local_fp32_param,
    safe_get_local_grad,
    safe_get_local_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_grad,
    safe_set_local_optimizer_state,
    safe_update_full_grad_vectorized,
)
from zeropp.deepspeed.utils.z3_leaf_module import (
    get_z3_leaf_modules,
    set_z3_leaf_module,
    set_z3_leaf_modules,
    set_z3_leaf_modules_by_name,
    set_z3_leaf_modules_by_suffix,
    unset_z3_leaf_modules,
    z3_leaf_module,
)
from zeropp.deepspeed.whole_steps import RepeatingLoader

__all__ = [
    "RepeatingLoader",
    "get_z3_leaf_modules",
    "log_dist",
    "logger",
    "safe_get_full_fp32_param",
    "safe_get_full_grad",
    "safe_get_full_optimizer_state",
    "safe_get_local_fp32_param",
    "safe_get_local_grad",
    "safe_get_local_optimizer_state",
    "safe_set_full_fp32_param",
    "safe_set_full_grad",
    "safe_set_full_optimizer_state",
    "safe_set_local_fp32_param",
    "safe_set_local_grad",
    "safe_set_local_optimizer_state",
    "safe_update_full_grad_vectorized",
    "set_z3_leaf_module",
    "set_z3_leaf_modules",
    "set_z3_leaf_modules_by_name",
    "set_z3_leaf_modules_by_suffix",
    "unset_z3_leaf_modules",
    "z3_leaf_module",
]

logger = logging.getLogger("zeropp")


def set_log_level_from_string(log_level_str: str, custom_logger: logging.Logger = logger) -> None:
    """Set the level of the log. Raises ValueError for another word than logging's own."""
    custom_logger.setLevel(log_level_str.upper())


def log_dist(message: Any, ranks: list[int] | None = None, level: int = logging.INFO) -> None:
    """Log a message on these ranks, on all if there are none or -1 is among them."""
    own = get_rank() if is_initialized() else 0
    if not ranks or -1 in ranks or own in ranks:
        logger.log(level, "[Rank %d] %s", own, message)


__getattr__ = attribute_of(__name__)
