"""Adam on CPUs with the interface of DeepSpeed's CPUAdam; moments may be bf16."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from zeropp.errors import InputError
from zeropp.optim.adam import MOMENTS, FusedAdam
from zeropp.optim.adam_op import HALVES


class CPUAdam(FusedAdam):
    """`FusedAdam` on fp32 or 16-bit parameters, or this rank's shards of them, on the CPU.

    Each step computes the new 16-bit weights in fp32 and rounds them, so that updates below half of
    the distance to the next number are lost; it takes an fp32 copy of them for the time of a step.
    With `fp32_optimizer_states=False`, moments are bf16 with stochastic rounding, which takes half
    the memory and bandwidth. The rounding depends only on `seed`, the step and the element's index.
    Raises InputError for parameters on other devices, and as `FusedAdam` does.
    """

    parameter_dtypes = (torch.float32, *HALVES)

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        *,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
        copies: Mapping[Tensor, Tensor] | None = None,
        seed: int = 0,
    ) -> None:
        self.moment_dtype = torch.float32 if fp32_optimizer_states else torch.bfloat16
        self.seed = seed
        super().__init__(
            params, lr, betas, eps, weight_decay, adamw_mode, bias_correction, copies=copies
        )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state, as every optimizer does; moments are not rounded to 16-bit parameters."""
        super().load_state_dict(state_dict)
        saved = [index for group in state_dict["param_groups"] for index in group["params"]]
        held = [parameter for group in self.param_groups for parameter in group["params"]]
        for index, parameter in zip(saved, held, strict=True):
            if parameter.dtype in HALVES and index in state_dict["state"]:
                for name in MOMENTS:
                    moment = state_dict["state"][index][name]
                    self.state[parameter][name] = moment.to(self.moment_dtype, copy=True)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as every optimizer does; raises InputError as the constructor does."""
        super().add_param_group(param_group)
        for parameter in self.param_groups[-1]["params"]:
            if parameter.device.type != "cpu":
                self.param_groups.pop()
                raise InputError(
                    f"CPUAdam updates parameters on the CPU, and one of shape "
                    f"{list(parameter.shape)} is on {parameter.device}: use zeropp.FusedAdam, "
                    "which runs where they are"
                )
