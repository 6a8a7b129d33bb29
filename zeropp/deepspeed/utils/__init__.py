"""`deepspeed.utils`: the logger."""

import logging

logger = logging.getLogger("zeropp")
