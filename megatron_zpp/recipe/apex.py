"""NVIDIA Apex's fused normalization and Adam, used where it is installed; always optional.

PyPI has an unrelated package named `apex`. It is recognized, without importing it, by the modules
that it lacks, and is not used.
"""

import importlib
import importlib.util
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.machinery import PathFinder

import torch
from torch import Tensor, nn

from megatron_zpp.model.part import NormClasses
from zeropp.optim import local_part

MODULES = ("normalization", "optimizers")
MOMENTS = ("exp_avg", "exp_avg_sq")

log = logging.getLogger("megatron_zpp")


@dataclass(frozen=True, kw_only=True)
class Apex:
    """The classes of an installed NVIDIA Apex."""

    layer_norm: type[nn.Module]
    rms_norm: type[nn.Module]
    adam: type[torch.optim.Optimizer]

    @property
    def norms(self) -> NormClasses:
        """The classes of its normalizations."""
        return NormClasses(layer_norm=self.layer_norm, rms_norm=self.rms_norm)


def find_apex(device: torch.device) -> Apex | None:
    """Return NVIDIA Apex if it can be used on `device`, which must be a CUDA device, or None.

    Logs that it is used, or why an installed package of that name is not.
    """
    if device.type != "cuda":
        return None
    package = importlib.util.find_spec("apex")  # does not import it
    if package is None:
        return None
    folders = package.submodule_search_locations or []
    for module in MODULES:
        if PathFinder.find_spec(f"apex.{module}", folders) is None:
            log.info(
                "ignoring the installed package apex, which is not NVIDIA Apex (no apex.%s)", module
            )
            return None
    try:
        return _load_apex()
    except (ImportError, AttributeError, RuntimeError) as error:
        log.info("NVIDIA Apex is installed but not usable (%s): using PyTorch instead", error)
        return None


class ApexAdam(torch.optim.Optimizer):
    """AdamW with Apex's kernel on this rank's shards; the state has the format of torch's AdamW.

    Apex supports plain tensors only, so `kernel` has parameters of its own, which share the memory
    of the local parts. It counts steps by group, so all parameters of a group must have had the
    same number of gradients.
    """

    def __init__(
        self,
        apex: Apex,
        parameters: Iterable,
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
    ) -> None:
        settings = dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
        super().__init__(parameters, settings)
        kernel_groups = [
            {"params": [nn.Parameter(_local_view(parameter)) for parameter in group["params"]]}
            for group in self.param_groups
        ]
        self.kernel = apex.adam(kernel_groups, adam_w_mode=True)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Update every parameter that has a gradient; a closure is not supported."""
        assert closure is None
        for group, kernel_group in zip(self.param_groups, self.kernel.param_groups, strict=True):
            for key in ("lr", "betas", "eps", "weight_decay"):
                kernel_group[key] = group[key]
            parameters = group["params"]
            for parameter, kernel_parameter in zip(parameters, kernel_group["params"], strict=True):
                self._share_memory(parameter, kernel_parameter)
            kernel_group["step"] = self._count_step(parameters)
        self.kernel.step()

    def _share_memory(self, parameter: Tensor, kernel_parameter: nn.Parameter) -> None:
        """Give the kernel's parameter the local memory of values, gradient and moments."""
        kernel_parameter.data, kernel_parameter.grad = _local_view(parameter), None
        if parameter.grad is None:
            return
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros(())
            for moment in MOMENTS:
                state[moment] = torch.zeros_like(parameter)
        if kernel_parameter.numel():
            kernel_parameter.grad = _local_view(parameter.grad)
        self.kernel.state[kernel_parameter] = {
            moment: _local_view(state[moment]) for moment in MOMENTS
        }

    def _count_step(self, parameters: list[Tensor]) -> int:
        """Add 1 to the steps of the parameters with gradients; return the steps before."""
        counters = [
            self.state[parameter]["step"] for parameter in parameters if parameter.grad is not None
        ]
        steps = {int(counter) for counter in counters}
        assert len(steps) <= 1, "some parameters of a group had no gradient in an earlier step"
        for counter in counters:
            counter += 1
        return steps.pop() if steps else 0


def _load_apex() -> Apex:
    normalization, optimizers = (importlib.import_module(f"apex.{module}") for module in MODULES)
    apex = Apex(
        layer_norm=normalization.FusedLayerNorm,
        rms_norm=normalization.FusedRMSNorm,
        adam=optimizers.FusedAdam,
    )
    # Without its CUDA extensions, Apex imports but fails here.
    apex.layer_norm(1)
    apex.adam([nn.Parameter(torch.zeros(1))])
    log.info("using NVIDIA Apex's fused normalization and Adam")
    return apex


def _local_view(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor or DTensor, sharing its memory, outside autograd."""
    return local_part(tensor).detach()
