"""What a step's time depends on in the settings of local SGD."""

from typing import Any


def step_key(config: Any) -> dict[str, Any]:
    """Return when replicas synchronize, and in how many bits, as JSON holds it."""
    own = config.zero.zeropp
    if (every := own.sync_every) == 1:
        return {}
    every = list(map(list, every)) if isinstance(every, tuple) else every
    others = ("sync_bits", "sync_fragments", "sync_delay")
    return {"sync_every": every, **{name: getattr(own, name) for name in others}}


STEP_KEYS = (step_key,)
