"""The optimizer that the JSON names."""

import logging
from typing import Any

import torch
from torch import nn

from zeropp.capabilities.muon.groups import groups_of, stacks_of
from zeropp.capabilities.muon.matrix_step import MuonOptions
from zeropp.capabilities.muon.muon import Muon
from zeropp.deepspeed.ops import adam
from zeropp.errors import InputError
from zeropp.optim.adam import fastest_adamw
from zeropp.settings.zero_config import ZeroConfig

log = logging.getLogger("zeropp")
JSON_LR = 1e-3  # DeepSpeed's default if the JSON names an optimizer without a rate


def named_optimizer(
    zero: ZeroConfig, parameters: list[Any], model: nn.Module
) -> torch.optim.Optimizer:
    """Return the optimizer that the JSON names, ours or torch's, on a model's parameters or groups.

    Raises InputError for one that PyTorch does not have, and for parameters that Muon cannot take.
    """
    if zero.optimizer.type == "Muon":
        return _muon(zero, parameters, model)
    kind, settings = zero.optimizer.type, zero.optimizer.arguments()
    if kind in ("Adam", "AdamW"):
        settings = {
            "lr": JSON_LR,
            "betas": (0.9, 0.999),
            "eps": 1e-8,
            "weight_decay": 0.0,
        } | settings
        settings["adam_w_mode"] |= kind == "AdamW"
        return fastest_adamw(
            parameters,
            torch_on_cpu=settings.pop("torch_adam"),
            kind=adam.FusedAdam,
            **settings,
        )
    if not hasattr(torch.optim, kind):
        raise InputError(
            f'optimizer.type = "{kind}": PyTorch {torch.__version__} has no torch.optim.{kind}; '
            "give zeropp.initialize an optimizer of that kind, or name another one"
        )
    return getattr(torch.optim, kind)(parameters, **settings)


def _muon(zero: ZeroConfig, parameters: list[Any], model: nn.Module) -> Muon:
    """Return Muon for matrices among the parameters, which are chosen unless groups say so."""
    settings = {"lr": JSON_LR, "weight_decay": 0.0} | zero.optimizer.arguments()
    if "eps" in settings:
        settings["adam_eps"] = settings.pop("eps")
    lr = settings["lr"]
    rates = {True: settings.pop("muon_lr", lr), False: settings.pop("adam_lr", lr)}
    groups = groups_of(model, parameters)
    for group in groups:
        group.setdefault("lr", rates[group["use_muon"]])
        name = "Muon" if group["use_muon"] else "AdamW"
        log.info("%s: %d parameters at lr %g", name, len(group["params"]), group["lr"])
    settings |= {"options": MuonOptions.of(zero), "parts": stacks_of(model)}
    return Muon(groups, config=zero, **settings)
