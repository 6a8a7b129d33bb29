"""NVIDIA Apex's fused normalization and Adam, where they are installed; never needed.

The package on PyPI that is also called `apex` is something else: it is recognised by the parts it
lacks, without being imported, and changes nothing.
"""

import importlib
import importlib.util
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.machinery import PathFinder

import torch
from torch import Tensor, nn

from zeropp.optim.step import local_part

PARTS = ("normalization", "optimizers")
MOMENTS = ("exp_avg", "exp_avg_sq")

log = logging.getLogger("megatron_zpp")


@dataclass(frozen=True, kw_only=True)
class Apex:
    """The classes of an installed NVIDIA Apex."""

    layer_norm: type[nn.Module]
    rms_norm: type[nn.Module]
    adam: type[torch.optim.Optimizer]


def find_apex(device: torch.device) -> Apex | None:
    """NVIDIA Apex if it can be used on `device`, which must be a CUDA one; None otherwise.

    Says in the log that it is used, or why an installed package of that name is not.
    """
    if device.type != "cuda":
        return None
    package = importlib.util.find_spec("apex")  # finds, does not import
    if package is None:
        return None
    for part in PARTS:
        if PathFinder.find_spec(f"apex.{part}", package.submodule_search_locations or []) is None:
            log.info("the installed package apex is not NVIDIA Apex (no apex.%s): not used", part)
            return None
    try:
        return _load()
    except (ImportError, AttributeError, RuntimeError) as error:
        log.info("NVIDIA Apex is installed but not usable (%s): PyTorch's own is used", error)
        return None


def fuse_norms(model: nn.Module, apex: Apex) -> None:
    """Replace each LayerNorm and RMSNorm in the model by Apex's; parameters and names stay."""
    kinds = {nn.LayerNorm: apex.layer_norm, nn.RMSNorm: apex.rms_norm}
    for parent in list(model.modules()):
        for name, norm in list(parent.named_children()):
            if type(norm) not in kinds:
                continue
            with torch.device("meta"):
                fused = kinds[type(norm)](norm.normalized_shape, eps=norm.eps)
            for kind, parameter in norm.named_parameters():
                setattr(fused, kind, parameter)
            setattr(parent, name, fused)


class ApexAdam(torch.optim.Optimizer):
    """AdamW by Apex's kernel on this rank's shards; the state is that of torch's AdamW.

    Apex knows plain tensors only, so a stand-in shares the memory of each parameter's local part.
    Its kernel counts steps by group: parameters of a group must have had equally many gradients.
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
        groups = [[nn.Parameter(_local(p)) for p in g["params"]] for g in self.param_groups]
        self.kernel = apex.adam([{"params": group} for group in groups], adam_w_mode=True)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Update every parameter that has a gradient; a closure is not supported."""
        assert closure is None
        for ours, theirs in zip(self.param_groups, self.kernel.param_groups, strict=True):
            theirs |= {key: ours[key] for key in ("lr", "betas", "eps", "weight_decay")}
            for parameter, stand_in in zip(ours["params"], theirs["params"], strict=True):
                self._show(parameter, stand_in)
            theirs["step"] = self._count_step(ours["params"])
        self.kernel.step()

    def _show(self, parameter: Tensor, stand_in: nn.Parameter) -> None:
        """Let the stand-in share the parameter's, the gradient's and the moments' local memory."""
        stand_in.data, stand_in.grad = _local(parameter), None
        if parameter.grad is None:
            return
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros(())
            for moment in MOMENTS:
                state[moment] = torch.zeros_like(parameter)
        if stand_in.numel():
            stand_in.grad = _local(parameter.grad)
        self.kernel.state[stand_in] = {moment: _local(state[moment]) for moment in MOMENTS}

    def _count_step(self, parameters: list[Tensor]) -> int:
        """Steps that the parameters with gradients have had; from now on one more."""
        counters = [self.state[p]["step"] for p in parameters if p.grad is not None]
        steps = {int(counter) for counter in counters}
        assert len(steps) <= 1, "some parameters of a group had no gradient in an earlier step"
        for counter in counters:
            counter += 1
        return steps.pop() if steps else 0


def _load() -> Apex:
    normalization, optimizers = (importlib.import_module(f"apex.{part}") for part in PARTS)
    apex = Apex(
        layer_norm=normalization.FusedLayerNorm,
        rms_norm=normalization.FusedRMSNorm,
        adam=optimizers.FusedAdam,
    )
    apex.layer_norm(1)  # an Apex built without its CUDA extensions imports, and fails here
    apex.adam([nn.Parameter(torch.zeros(1))])
    log.info("NVIDIA Apex: its fused normalization and Adam are used")
    return apex


def _local(tensor: Tensor) -> Tensor:
    """This rank's part of a possibly distributed tensor, sharing its memory, outside autograd."""
    return local_part(tensor).detach()
