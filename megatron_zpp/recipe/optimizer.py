"""Build the optimizer of a sharded model from a configuration."""

import torch

from megatron_zpp.model.attention.attention import QK_NORMS
from megatron_zpp.recipe.apex import Apex, ApexAdam
from megatron_zpp.settings.config import Config
from zeropp import Sharding
from zeropp.optim.adam import fastest_adamw
from zeropp.optim.offloaded import offloaded_adamw


def build_optimizer(
    sharding: Sharding, config: Config, device: torch.device, apex: Apex | None
) -> torch.optim.Optimizer:
    """Build AdamW on the device, or on the host if `config.zero` offloads the optimizer.

    Offloaded, the 16-bit weights are moved to `device`.
    """
    groups = parameter_groups(
        sharding.model,
        decouples_ends=config.optimizer.decoupled_lr is not None,
        qk_norms_decay=config.optimizer.no_weight_decay_cond_type is not None,
    )
    settings = adam_settings(config)
    if config.zero.offloads_optimizer:
        return offloaded_adamw(sharding, groups, device, config.zero, **settings)
    if apex:
        return ApexAdam(apex, groups, **settings)
    return fastest_adamw(groups, **settings, torch_on_cpu=config.optimizer.cpu_torch_adam)


def parameter_groups(
    model: torch.nn.Module, *, decouples_ends: bool = False, qk_norms_decay: bool = False
) -> list[dict]:
    """Return Megatron's groups of trained parameters: matrices decay, biases and gains do not.

    With `decouples_ends`, the token embedding and the output layer are a group of their own. With
    `qk_norms_decay`, what normalizes queries and keys decays too.
    """
    layers = (getattr(model, name, None) for name in ("tokens", "head"))
    ends = [layer.weight for layer in layers if layer is not None]
    groups: dict[tuple[bool, bool], list] = {
        (True, False): [],
        (False, False): [],
        (True, True): [],
    }
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            at_ends = decouples_ends and any(parameter is each for each in ends)
            is_qk_norm = not QK_NORMS.isdisjoint(name.split("."))
            decays = parameter.ndim >= 2 or (qk_norms_decay and is_qk_norm)
            groups[decays, at_ends].append(parameter)
    return [
        {"params": parameters, "decays": decays, "at_ends": at_ends}
        for (decays, at_ends), parameters in groups.items()
        if parameters
    ]


def adam_settings(config: Config) -> dict:
    """Return the arguments of Adam that the flags set."""
    return {
        "lr": config.optimizer.lr,
        "betas": (config.optimizer.adam_beta1, config.optimizer.adam_beta2),
        "eps": config.optimizer.adam_eps,
        "weight_decay": config.optimizer.weight_decay,
    }
