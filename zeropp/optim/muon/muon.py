"""Muon: matrices move along their orthogonalized momentum, everything else by AdamW.

On shards, each node orthogonalizes its own rows of a matrix, over its fast links: nothing more
crosses nodes than with AdamW (docs/muon.md). Sources: Jordan et al. 2024; Liu et al. 2025,
arXiv:2502.16982 (Moonlight).
"""

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from zeropp.errors import InputError
from zeropp.optim.adam import FusedAdam, Update
from zeropp.optim.muon.blocks import Matrix
from zeropp.optim.muon.matrix_step import MOMENTUM, MatrixStep, MuonOptions
from zeropp.optim.muon.newton_schulz import JORDAN
from zeropp.settings.zero_config import ZeroConfig
from zeropp.wire.traffic import Traffic

log = logging.getLogger("zeropp")
ADJUSTMENTS = MappingProxyType(  # torch's adjust_lr_fn -> scale_mode, extra_scale_factor
    {
        None: ("shape_scaling", 1.0),
        "original": ("shape_scaling", 1.0),
        "match_rms_adamw": ("spectral", 0.2),
    }
)


class MuonGroups(FusedAdam):
    """AdamW whose groups with `use_muon` are Muon's."""

    matrices: MatrixStep

    def _updates(self, group: dict[str, Any], seed: int) -> Iterable[Update]:
        return () if group.get("use_muon") else super()._updates(group, seed)

    def _apply(self, updates: Sequence[Update], factor: Tensor | None) -> None:
        scale = 1.0 if factor is None else factor.item()  # the host waits
        if not math.isfinite(scale):
            return
        super()._apply(updates, factor)
        trained = [
            (parameter, group)
            for group in self.param_groups
            if group.get("use_muon")
            for parameter in group["params"]
            if parameter.grad is not None
        ]
        gradients = [parameter.grad for parameter, _ in trained]
        if scale != 1.0 and gradients:
            torch._foreach_mul_(gradients, scale)
        self.matrices.run(
            (parameter, group, self._momentum_of(parameter), self.copies.get(parameter))
            for parameter, group in trained
        )
        self._counted += [self.state[parameter]["step"] for parameter, _ in trained]
        self._moved([parameter for parameter, _ in trained])

    def _moved(self, parameters: Sequence[Tensor]) -> None:
        """Take note of matrices that have moved."""

    def expected_traffic(self) -> Mapping[tuple[str, str], float]:
        """Return the bytes this rank sends per step, by (purpose, hop)."""
        return self.matrices.expected_traffic(self.muon_parameters)

    def flops(self) -> int:
        """Return the operations of this rank's Newton-Schulz iterations in a step."""
        steps = [len(group["ns_coefficients"]) for group in self.param_groups if group["use_muon"]]
        return self.matrices.flops(self.muon_parameters, max(steps, default=0))

    @property
    def muon_parameters(self) -> list[Tensor]:
        """The matrices that Muon moves."""
        groups = (group for group in self.param_groups if group.get("use_muon"))
        return [each for group in groups for each in group["params"]]

    @property
    def traffic(self) -> Traffic:
        """The ledger of what was sent for matrices."""
        return self.matrices.traffic

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Load a state; momentum starts anew where another optimizer saved its own."""
        super().__setstate__(state)
        anew = [parameter for parameter, entries in self.state.items() if not entries]
        if anew:
            log.info(
                "Muon: momentum of %d parameters starts anew: what was saved is another "
                "optimizer's",
                len(anew),
            )

    def _take_loaded(self, parameter: Tensor, entries: dict[str, Any]) -> None:
        """Take a loaded state, or none of it where another optimizer saved its own."""
        is_muon = any(parameter is each for each in self.muon_parameters)
        if is_muon and MOMENTUM in entries:
            count = float(entries.get("step", 0))
            entries["step"] = torch.tensor(count, dtype=torch.float32, device="cpu")
        elif is_muon or MOMENTUM in entries:
            entries.clear()
        else:
            super()._take_loaded(parameter, entries)

    def _momentum_of(self, parameter: Tensor) -> dict[str, Tensor]:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device="cpu")
            state[MOMENTUM] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        return state


class Muon(MuonGroups):
    """Muon for matrices, AdamW for the rest, in the terms of `torch.optim.Muon`.

    Args:
        params: A model, or groups with `use_muon`, true or false. Of a model, matrices inside
            `nn.ModuleList`s are Muon's, except those of embeddings.
        lr: Learning rate of both.
        weight_decay: Decoupled weight decay of both.
        momentum: Decay of the momentum.
        nesterov: Whether the momentum looks ahead by one step.
        ns_coefficients: Three numbers for all Newton-Schulz iterations, or as many triples.
        eps: Smallest norm by which a block is divided.
        ns_steps: Newton-Schulz iterations.
        adjust_lr_fn: torch's factor of updates, "original" (also None) or "match_rms_adamw".
        scale_mode: Megatron's factor, "spectral", "unit_rms_norm" or "shape_scaling", in its place.
        extra_scale_factor: A further factor, with `scale_mode`.
        betas: Of AdamW.
        adam_eps: Of AdamW.
        options: Where matrices are orthogonalized.
        config: Which ranks form a node; by default those of a machine.
        parts: Matrices whose rows are orthogonalized in several parts.
        copies: As for `FusedAdam`.

    Raises:
        InputError: For parameters that are not fp32, matrices of other than two dims under
            `use_muon`, and values out of range.

    Example:
        ```python
        optimizer = zeropp.optim.Muon(model, lr=2e-2)
        ```
    """

    def __init__(
        self,
        params: nn.Module | Iterable[Mapping[str, Any]],
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: Sequence = JORDAN,
        eps: float = 1e-7,
        *,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        scale_mode: str | None = None,
        extra_scale_factor: float = 1.0,
        betas: tuple[float, float] = (0.9, 0.999),
        adam_eps: float = 1e-8,
        options: MuonOptions | None = None,
        config: ZeroConfig | None = None,
        parts: Mapping[Tensor, Matrix] = MappingProxyType({}),
        copies: Mapping[Tensor, Tensor] | None = None,
    ) -> None:
        groups = groups_of(params) if isinstance(params, nn.Module) else [*params]
        if scale_mode is None:
            scale_mode, extra_scale_factor = ADJUSTMENTS[adjust_lr_fn]
        groups = with_options(
            groups,
            momentum=momentum,
            nesterov=nesterov,
            ns_coefficients=ns_coefficients,
            ns_steps=ns_steps,
            eps=eps,
            scale_mode=scale_mode,
            extra_scale_factor=extra_scale_factor,
        )
        self.matrices = MatrixStep(
            config or ZeroConfig(), options or MuonOptions(), groups[0]["params"][0].device, parts
        )
        super().__init__(groups, lr, betas, adam_eps, weight_decay, copies=copies)


def moments_per_weight(optimizer: torch.optim.Optimizer) -> float:
    """Return how many numbers of state an optimizer, Adam or Muon, has for a weight, on average."""
    groups = optimizer.param_groups
    sizes = [sum(each.numel() for each in group["params"]) for group in groups]
    moments = [1 if group.get("use_muon") else 2 for group in groups]
    return sum(a * b for a, b in zip(sizes, moments, strict=True)) / sum(sizes)


def with_options(groups: Sequence[Mapping[str, Any]], **options: Any) -> list[dict[str, Any]]:
    """Return groups of which those with `use_muon` have Muon's options, as `muon_options` takes.

    Raises InputError for groups that Muon cannot take, and for values out of range.
    """
    require_matrices(groups)
    of_muon = muon_options(**options)
    return [{**of_muon, **group} if group["use_muon"] else dict(group) for group in groups]


def muon_options(
    *,
    momentum: float,
    nesterov: bool,
    ns_coefficients: Sequence,
    ns_steps: int,
    eps: float = 1e-7,
    scale_mode: str,
    extra_scale_factor: float,
) -> dict[str, Any]:
    """Return what a group with `use_muon` holds; raises InputError for values out of range."""
    triples = [ns_coefficients] if isinstance(ns_coefficients[0], float | int) else ns_coefficients
    repeated = [tuple(map(float, each)) for each in triples]
    if len(repeated) < ns_steps:
        repeated += repeated[-1:] * (ns_steps - len(repeated))
    wrong = [f"momentum = {momentum}"] * (not 0 <= momentum < 1)
    wrong += [f"ns_steps = {ns_steps}"] * (not 1 <= ns_steps < 100)
    wrong += [f"ns_coefficients = {ns_coefficients}"] * any(len(each) != 3 for each in repeated)
    wrong += [f"extra_scale_factor = {extra_scale_factor}"] * (not extra_scale_factor > 0)
    if wrong:
        raise InputError(
            f"Muon cannot run with {', '.join(wrong)}: momentum is at least 0 and below 1, "
            "ns_steps 1 to 99, coefficients are triples, and the factor is above 0"
        )
    return {
        "momentum": momentum,
        "nesterov": nesterov,
        "ns_coefficients": tuple(repeated[:ns_steps]),
        "eps": eps,
        "scale_mode": scale_mode,
        "extra_scale_factor": extra_scale_factor,
    }


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Return the trained parameters of a model in two groups, Muon's and AdamW's.

    Matrices of modules in `nn.ModuleList`s are Muon's, but not those of embeddings. Raises
    InputError for a model without any.
    """
    embedded = {
        parameter
        for module in model.modules()
        if isinstance(module, nn.Embedding)
        for parameter in module.parameters()
    }
    in_blocks = {
        parameter: None
        for module in model.modules()
        if isinstance(module, nn.ModuleList)
        for parameter in module.parameters()
        if parameter.requires_grad and parameter.ndim == 2 and parameter not in embedded
    }
    others = [each for each in model.parameters() if each.requires_grad and each not in in_blocks]
    if not in_blocks:
        raise InputError(
            "Muon: no trained matrix inside an nn.ModuleList: give groups of parameters with "
            "use_muon, as [{'params': matrices, 'use_muon': True}, {'params': others, "
            "'use_muon': False}]"
        )
    groups = [{"params": [*in_blocks], "use_muon": True}, {"params": others, "use_muon": False}]
    return [group for group in groups if group["params"]]


def require_matrices(groups: Sequence[Mapping[str, Any]]) -> None:
    """Raise InputError for groups that Muon cannot take."""
    if not groups:
        raise InputError("Muon: no parameters; give a model, or groups with use_muon")
    for group in groups:
        if "use_muon" not in group:
            raise InputError(
                "Muon: a group has no use_muon: set it to True for matrices inside the model, and "
                "to False for embeddings, output layers and vectors, which AdamW updates"
            )
        shapes = [[*each.shape] for each in group["params"] if each.ndim != 2]
        if group["use_muon"] and shapes:
            raise InputError(
                f"Muon orthogonalizes matrices, and use_muon is set for a parameter of shape "
                f"{shapes[0]}: put it into a group with use_muon False"
            )
