"""What the settings of local SGD contradict, and what a step's time depends on in them."""

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
OBSTACLES = {
    "--skip-samples names samples of whole batches, and with zeropp.sync_store the size of a batch "
    "follows the number of nodes: leave one of them out": (
        lambda c: c.data.skipped and c.zero.zeropp.sync_store and c.zero.zeropp.sync_every != 1
    ),
    "--rehearse-ranks: replicas that train independently have no peers to plan: rehearse the ranks "
    "of one of them, without zeropp.sync_every": (
        lambda c: c.training.rehearse_ranks and c.zero.zeropp.sync_every != 1
    ),
}
