"""Build the optimizer of a sharded model from a configuration."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from megatron_zpp.model.attention.attention import QK_NORMS
from megatron_zpp.recipe.apex import Apex, ApexAdam
from megatron_zpp.recipe.capability import Capability, OwnGroup
from megatron_zpp.settings.config import OptimizerConfig
from zeropp import Sharding
from zeropp.optim import fastest_adamw


class _Group(NamedTuple):
    """What parameters of a group have in common; groups are in this order."""

    is_embedding: bool
    no_decay: bool
    is_adams: bool  # where others are of the capability's own group


def build_optimizer(
    sharding: Sharding,
    config: OptimizerConfig,
    device: torch.device,
    apex: Apex | None,
    capabilities: Sequence[Capability],
) -> torch.optim.Optimizer:
    """Build a capability's optimizer if one has its own, else AdamW."""
    own = next((each.own_group for each in capabilities if each.own_group), None)
    groups = parameter_groups(
        sharding.model,
        decouples_ends=config.decoupled_lr is not None,
        qk_norms_decay=config.no_weight_decay_cond_type is not None,
        own=own,
    )
    settings = {
        "lr": config.lr,
        "betas": (config.adam_beta1, config.adam_beta2),
        "eps": config.adam_eps,
        "weight_decay": config.weight_decay,
    }
    for each in capabilities:
        optimizer = each.build_optimizer(sharding, groups, device, settings)
        if optimizer is not None:
            return optimizer
    if apex:
        return ApexAdam(apex, groups, **settings)
    return fastest_adamw(groups, **settings, torch_on_cpu=config.cpu_torch_adam)


def parameter_groups(
    model: torch.nn.Module,
    *,
    decouples_ends: bool = False,
    qk_norms_decay: bool = False,
    own: OwnGroup | None = None,
) -> list[dict]:
    """Return Megatron's groups of trained parameters: matrices decay, biases and gains do not.

    With `decouples_ends`, the token embedding and the output layer are a group of their own. With
    `qk_norms_decay`, what normalizes queries and keys decays too. With `own`, groups say by its key
    whether they have its parameters.
    """
    layers = (getattr(model, name, None) for name in ("tokens", "head"))
    embeddings = [layer.weight for layer in layers if layer is not None]
    groups: dict[_Group, list] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            is_embedding = decouples_ends and any(parameter is each for each in embeddings)
            is_qk_norm = not QK_NORMS.isdisjoint(name.split("."))
            decays = parameter.ndim >= 2 or (qk_norms_decay and is_qk_norm)
            is_adams = own is None or not own.has(name, parameter)
            group = _Group(is_embedding, no_decay=not decays, is_adams=is_adams)
            groups.setdefault(group, []).append(parameter)
    return [
        {"params": groups[key], "decays": not key.no_decay, "at_ends": key.is_embedding}
        | ({own.key: not key.is_adams} if own else {})
        for key in sorted(groups)
    ]
