"""Build the optimizer of a sharded model from a configuration."""

from typing import NamedTuple

import torch

from megatron_zpp.model.attention.attention import QK_NORMS
from megatron_zpp.model.lora import is_adapter
from megatron_zpp.recipe.apex import Apex, ApexAdam
from megatron_zpp.recipe.matrix_parts import matrix_parts
from megatron_zpp.settings.config import Config
from zeropp import Sharding
from zeropp.optim.adam import fastest_adamw
from zeropp.optim.muon.matrix_step import MuonOptions
from zeropp.optim.muon.muon import Muon
from zeropp.optim.muon.newton_schulz import coefficients_of
from zeropp.optim.muon.offloaded_muon import offloaded_muon
from zeropp.optim.offloaded import offloaded_adamw


class _Group(NamedTuple):
    """What parameters of a group have in common; groups are in this order."""

    at_ends: bool
    stays: bool  # without weight decay
    is_adams: bool  # where others are Muon's


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
        has_muon=config.optimizer.optimizer == "muon",
    )
    settings = adam_settings(config)
    if config.optimizer.optimizer == "muon":
        return _build_muon(sharding, groups, config, device)
    if config.zero.offloads_optimizer:
        return offloaded_adamw(sharding, groups, device, config.zero, **settings)
    if apex:
        return ApexAdam(apex, groups, **settings)
    return fastest_adamw(groups, **settings, torch_on_cpu=config.optimizer.cpu_torch_adam)


def _build_muon(
    sharding: Sharding, groups: list[dict], config: Config, device: torch.device
) -> torch.optim.Optimizer:
    """Build Muon for matrices of blocks, and AdamW for the rest."""
    muon, zero = config.muon, config.zero
    adam = adam_settings(config)
    adam["adam_eps"] = adam.pop("eps")
    settings = adam | {
        "momentum": muon.muon_momentum,
        "nesterov": muon.muon_nesterov,
        "ns_coefficients": coefficients_of(muon.muon_coefficient_type, muon.muon_num_ns_steps),
        "ns_steps": muon.muon_num_ns_steps,
        "scale_mode": muon.muon_scale_mode,
        "extra_scale_factor": muon.muon_extra_scale_factor,
        "options": muon_options(config),
        "parts": matrix_parts(sharding.model, config.model, muon),
    }
    if zero.offloads_optimizer:
        return offloaded_muon(sharding, groups, device, zero, **settings)
    return Muon(groups, config=zero, **settings)


def muon_options(config: Config) -> MuonOptions:
    """Return where matrices are orthogonalized, and in which numbers."""
    muon = config.muon
    dtype = None if muon.muon_fp32_matmul_prec == "medium" else torch.float32
    return MuonOptions.of(config.zero, tp_mode=muon.muon_tp_mode, dtype=dtype)


def is_muons(name: str, parameter: torch.nn.Parameter) -> bool:
    """Whether Muon moves a parameter of a GPT: matrices of blocks, but not adapters."""
    return name.startswith("blocks.") and parameter.ndim == 2 and not is_adapter(name)


def parameter_groups(
    model: torch.nn.Module,
    *,
    decouples_ends: bool = False,
    qk_norms_decay: bool = False,
    has_muon: bool = False,
) -> list[dict]:
    """Return Megatron's groups of trained parameters: matrices decay, biases and gains do not.

    With `decouples_ends`, the token embedding and the output layer are a group of their own. With
    `qk_norms_decay`, what normalizes queries and keys decays too. With `has_muon`, groups say
    whether they `use_muon`: matrices of blocks do, but not adapters.
    """
    layers = (getattr(model, name, None) for name in ("tokens", "head"))
    ends = [layer.weight for layer in layers if layer is not None]
    groups: dict[_Group, list] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            at_ends = decouples_ends and any(parameter is each for each in ends)
            is_qk_norm = not QK_NORMS.isdisjoint(name.split("."))
            decays = parameter.ndim >= 2 or (qk_norms_decay and is_qk_norm)
            is_adams = not (has_muon and is_muons(name, parameter))
            group = _Group(at_ends, stays=not decays, is_adams=is_adams)
            groups.setdefault(group, []).append(parameter)
    return [
        {"params": groups[key], "decays": not key.stays, "at_ends": key.at_ends}
        | ({"use_muon": not key.is_adams} if has_muon else {})
        for key in sorted(groups)
    ]


def adam_settings(config: Config) -> dict:
    """Return the arguments of Adam that the flags set."""
    return {
        "lr": config.optimizer.lr,
        "betas": (config.optimizer.adam_beta1, config.optimizer.adam_beta2),
        "eps": config.optimizer.adam_eps,
        "weight_decay": config.optimizer.weight_decay,
    }
