"""Nodes that step alone, as the JSON describes them."""

import torch

from megatron_zpp.parallel.mesh import Ranks
from megatron_zpp.settings.config import Config
from zeropp import Sharding
from zeropp.optim.local_steps.elastic_steps import ElasticSteps
from zeropp.optim.local_steps.held_model import OfSharding
from zeropp.optim.local_steps.local_steps import LocalSteps
from zeropp.optim.local_steps.trained_weights import TrainedWeights


def build_local_steps(
    config: Config,
    ranks: Ranks,
    sharding: Sharding,
    optimizer: torch.optim.Optimizer,
) -> LocalSteps | None:
    """Return what lets nodes step alone, if the JSON asks for it."""
    if ranks.outer is None:
        return None
    weights = TrainedWeights(model=OfSharding(sharding), optimizer=optimizer)
    settings = config.zero.zeropp
    kind = LocalSteps if ranks.elastic is None else ElasticSteps
    return kind.of(settings, weights, ranks.outer)
