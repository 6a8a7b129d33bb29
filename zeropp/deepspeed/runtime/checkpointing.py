"""`deepspeed.checkpointing`: activations that are computed again in backward, by PyTorch."""

import logging
from collections.abc import Callable
from typing import Any

import torch.utils.checkpoint

log = logging.getLogger("zeropp")


def checkpoint(function: Callable, *args: Any, **kwargs: Any) -> Any:
    """Return `function(*args, **kwargs)`; what it keeps for backward is computed again then.

    This is `torch.utils.checkpoint.checkpoint` without reentrance, which restores random numbers.
    """
    return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False, **kwargs)


non_reentrant_checkpoint = checkpoint


def configure(mpu_: Any = None, deepspeed_config: Any = None, **settings: Any) -> None:
    """Accept DeepSpeed's settings, of which none has an effect here; a line says so."""
    given = [name for name, value in settings.items() if value]
    if mpu_ is not None:
        given.append("mpu_")
    if deepspeed_config is not None:
        given.append("deepspeed_config")
    if given:
        log.info(
            "checkpointing.configure(%s) has no effect here: activations are recomputed by "
            "torch.utils.checkpoint, on the device, and not split over ranks",
            ", ".join(given),
        )


def is_configured() -> bool:
    """Whether `checkpoint` may be called: always."""
    return True


def reset() -> None:
    """Forget buffers of activations, of which there are none."""
