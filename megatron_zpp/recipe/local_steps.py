"""Nodes that step alone, as the JSON describes them."""

import torch

from megatron_zpp.parallel.mesh import Ranks
from megatron_zpp.settings.config import Config
from zeropp import Sharding
from zeropp.optim.local_steps.fragment import OuterOptions
from zeropp.optim.local_steps.held_model import OfSharding
from zeropp.optim.local_steps.local_steps import LocalSteps
from zeropp.optim.local_steps.trained_weights import TrainedWeights
from zeropp.settings.sync_schedule import SyncSchedule


def build_local_steps(
    config: Config, ranks: Ranks, sharding: Sharding, optimizer: torch.optim.Optimizer
) -> LocalSteps | None:
    """Return what lets nodes step alone, if the JSON asks for it."""
    if ranks.outer is None:
        return None
    settings = config.zero.zeropp
    return LocalSteps(
        weights=TrainedWeights(model=OfSharding(sharding), optimizer=optimizer),
        group=ranks.outer,
        schedule=SyncSchedule.of(settings.sync_every, settings.sync_fragments, settings.sync_delay),
        options=OuterOptions(
            bits=settings.sync_bits,
            lr=settings.outer_lr,
            momentum=settings.outer_momentum,
            on_host=settings.sync_on_host,
            mixing=settings.sync_mixing,
        ),
    )
