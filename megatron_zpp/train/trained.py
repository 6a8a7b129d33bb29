"""What training changes of a run, and what a checkpoint holds of it beside the counters."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from megatron_zpp.monitor.matmul_rate import warn_if_float32_is_faster
from megatron_zpp.parallel.mesh import Ranks
from megatron_zpp.recipe.apex import find_apex
from megatron_zpp.recipe.capability import Capability, capabilities_of
from megatron_zpp.recipe.model import build_model
from megatron_zpp.recipe.optimizer import build_optimizer
from megatron_zpp.settings.config import Config, PrecisionConfig
from zeropp import LossScaler, Sharding


@dataclass(kw_only=True)
class Trained:
    """The model, the optimizer, the loss scale, and what else acts in steps.

    `config` is the complete configuration, and `ranks` are those that train.
    """

    config: Config
    ranks: Ranks
    sharding: Sharding
    optimizer: torch.optim.Optimizer
    scaler: LossScaler | None
    capabilities: Sequence[Capability] = ()


def build_trained(
    config: Config, ranks: Ranks, vocab_size: int, fill: Callable[[torch.nn.Module], None] | None
) -> Trained:
    """Build the model, whose weights `fill` writes or which are drawn, and what trains it."""
    apex, capabilities = find_apex(ranks.device), capabilities_of(config, ranks)
    sharding = build_model(config, vocab_size, ranks, apex, fill, capabilities)
    warn_if_float32_is_faster(ranks.device, sharding.compute_dtype)
    optimizer = build_optimizer(sharding, config.optimizer, ranks.device, apex, capabilities)
    for each in capabilities:
        each.sharding, each.optimizer = sharding, optimizer
    ranks.replicas.bind(config.zero, sharding, optimizer)
    return Trained(
        config=config,
        ranks=ranks,
        sharding=sharding,
        optimizer=optimizer,
        scaler=build_scaler(config.precision),
        capabilities=capabilities,
    )


def build_scaler(precision: PrecisionConfig) -> LossScaler | None:
    """The loss scaler of fp16; nothing else needs one."""
    if not precision.fp16:
        return None
    fixed = precision.loss_scale
    return LossScaler(
        scale=precision.initial_loss_scale if fixed is None else fixed,
        min_scale=precision.min_loss_scale,
        window=precision.loss_scale_window,
        hysteresis=precision.hysteresis,
        dynamic=fixed is None,
    )
