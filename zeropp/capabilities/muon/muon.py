"""Muon: matrices move along their orthogonalized momentum, everything else by AdamW.

On shards, each node orthogonalizes its own rows of a matrix, over its fast links: nothing more
crosses nodes than with AdamW (docs/muon.md). Sources: Jordan et al. 2024; Liu et al. 2025,
arXiv:2502.16982 (Moonlight).
"""

import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from zeropp.capabilities.muon.blocks import Matrix
from zeropp.capabilities.muon.groups import (
    adjustment,
    as_saved,
    groups_of,
    listed,
    muon_options,
    require_matrices,
    stacks_of,
    tensors_in,
    with_options,
)
from zeropp.capabilities.muon.matrix_step import MOMENTUM, MatrixStep, MuonOptions
from zeropp.capabilities.muon.newton_schulz import JORDAN
from zeropp.errors import InputError
from zeropp.optim.adam import FusedAdam, Update
from zeropp.optim.step_or_skip import scale_gradients
from zeropp.settings.zero_config import ZeroConfig
from zeropp.wire.rank_group import Message
from zeropp.wire.traffic import Traffic

log = logging.getLogger("zeropp")


class MuonGroups(FusedAdam):
    """AdamW whose groups with `use_muon` are Muon's."""

    matrices: MatrixStep
    of_muon: Mapping[str, Any]  # options of groups that do not say others

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group with `use_muon`, true or false; raises InputError as the constructor does."""
        (group,) = listed([param_group])
        require_matrices(group)
        super().add_param_group(with_options(group, self.of_muon))

    def _updates(self, group: dict[str, Any], seed: int) -> Iterable[Update]:
        return () if group.get("use_muon") else super()._updates(group, seed)

    def _apply(self, updates: Sequence[Update], factor: Tensor | None) -> None:
        scale = 1.0 if factor is None else factor.item()  # the host waits
        if not math.isfinite(scale):
            return
        trained = [
            (parameter, group)
            for group in self.param_groups
            if group.get("use_muon")
            for parameter in group["params"]
            if parameter.grad is not None
        ]
        for parameter, _ in trained:
            self.matrices.axis(parameter)  # may refuse it, before anything has moved
        super()._apply(updates, factor)
        scale_gradients((parameter.grad for parameter, _ in trained), scale)
        self.matrices.run(
            (parameter, group, self._momentum_of(parameter), self.copies.get(parameter))
            for parameter, group in trained
        )
        self._counted += [self.state[parameter]["step"] for parameter, _ in trained]
        self._moved([parameter for parameter, _ in trained])

    def _moved(self, parameters: Sequence[Tensor]) -> None:
        """Take note of matrices that have moved."""

    def messages(self) -> Iterator[Message]:
        """Yield what this rank sends in a step, the mean of the steps."""
        return self.matrices.messages(self.muon_parameters)

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
    def ledger(self) -> Traffic:
        """The ledger of what was sent for matrices."""
        return self.matrices.traffic

    def state_numbers(self, group: Mapping[str, Any]) -> int:
        """Return how many numbers of state each weight of a group has."""
        return 1 if group.get("use_muon") else super().state_numbers(group)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Load a state, which may be torch.optim.Muon's.

        Momentum is reset where an optimizer of another kind saved its own. Raises InputError
        for groups that Muon cannot take.
        """
        groups = as_saved(state["param_groups"], getattr(self, "param_groups", ()))
        for group in groups:
            require_matrices(group)
        super().__setstate__({**state, "param_groups": groups})
        anew = [parameter for parameter, entries in self.state.items() if not entries]
        if anew:
            log.info(
                "Muon: momentum of %d parameters is reset: what was saved is another optimizer's",
                len(anew),
            )

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"matrices": self.matrices, "of_muon": self.of_muon}

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
            `nn.ModuleList`s are Muon's, except those of embeddings. A parameter [E, m, n]
            is a stack of matrices.
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
        InputError: For parameters that are not fp32, those of one dim or more than three under
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
        if isinstance(params, nn.Module):
            params, parts = groups_of(params), stacks_of(params) | dict(parts)
        groups = listed(params)
        if scale_mode is None:
            scale_mode, extra_scale_factor = adjustment(adjust_lr_fn)
        self.of_muon = muon_options(
            momentum=momentum,
            nesterov=nesterov,
            ns_coefficients=ns_coefficients,
            ns_steps=ns_steps,
            eps=eps,
            scale_mode=scale_mode,
            extra_scale_factor=extra_scale_factor,
        )
        device = next((each.device for group in groups for each in tensors_in(group)), None)
        if device is None:
            raise InputError("Muon: no parameters; give a model, or groups with use_muon")
        self.matrices = MatrixStep(config or ZeroConfig(), options or MuonOptions(), device, parts)
        super().__init__(groups, lr, betas, adam_eps, weight_decay, copies=copies)
