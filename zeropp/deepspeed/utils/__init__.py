"""`deepspeed.utils`: the logger, and what programs do with an engine's parameters."""

import logging
from typing import Any

from torch.distributed import get_rank, is_initialized

from zeropp.deepspeed.names import attribute_of

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
