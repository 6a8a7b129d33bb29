"""`deepspeed.ops.adam`: our Adam under DeepSpeed's names, with its defaults."""

from collections.abc import Callable, Iterable
from typing import Any

import torch

from zeropp.deepspeed.names import attribute_of
from zeropp.errors import InputError, Unavailable
from zeropp.optim import adam, cpu_adam


class FusedAdam(adam.FusedAdam):
    """Adam, or by default AdamW, with DeepSpeed's arguments; without weight decay by default.

    `options` are those of `zeropp.FusedAdam`, by name. Parameters may be in 16 bit: they are
    updated in fp32, and rounded. Raises InputError for `amsgrad`, and as `zeropp.FusedAdam` does.
    """

    parameter_dtypes = (torch.float32, torch.bfloat16, torch.float16)

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        *,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
        **options: Any,
    ) -> None:
        _refuse_amsgrad(amsgrad)
        super().__init__(params, lr, weight_decay=weight_decay, **options)


class DeepSpeedCPUAdam(cpu_adam.CPUAdam):
    """Adam, or by default AdamW, on the CPU, with DeepSpeed's arguments.

    `options` are those of `zeropp.optim.CPUAdam`, by name. `zeropp.initialize` moves the update to
    the CPU if the JSON says so; give it the model before it is moved to a GPU. Raises InputError
    for `amsgrad`, and as `zeropp.optim.CPUAdam` does.
    """

    def __init__(
        self,
        model_params: Iterable[Any],
        lr: float = 1e-3,
        *,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        **options: Any,
    ) -> None:
        _refuse_amsgrad(amsgrad)
        super().__init__(model_params, lr, weight_decay=weight_decay, **options)

    def step_subgroup(self, subgroup_id: int, closure: Callable[[], Any] | None = None) -> Any:
        """Step the parameter that has a gradient, with the state that has the id for its key."""
        (parameter,) = self._with_gradients()
        own = self.state.pop(parameter, None)
        if subgroup_id in self.state:
            self.state[parameter] = self.state.pop(subgroup_id)
        result = self.step(closure)
        self.settle()
        self.state[subgroup_id] = self.state.pop(parameter)
        if own is not None:
            self.state[parameter] = own
        return result

    @torch.no_grad()
    def rollback_subgroup(self, subgroup_id: int) -> None:
        """Undo the last `step_subgroup` of an id, with the gradient that it had, but for rounding.

        Raises InputError, a RuntimeError, if there was none.
        """
        state = self.state.get(subgroup_id)
        if not state:
            raise Unavailable(
                f"Cannot rollback optimizer state for sub_group_id {subgroup_id}: it has none"
            )
        if not state["step"]:
            raise Unavailable(f"Cannot rollback sub_group_id {subgroup_id}: step count is 0")
        (parameter,) = self._with_gradients()
        group = self.param_groups[0]
        (beta1, beta2), count = group["betas"], float(state["step"])
        mean, square, gradient = state["exp_avg"], state["exp_avg_sq"], parameter.grad.float()
        size = (square.float() / (1 - beta2**count)).sqrt() + group["eps"]
        weight = parameter.float() + group["lr"] / (1 - beta1**count) * mean.float() / size
        if group["decoupled_weight_decay"]:
            weight /= 1 - group["lr"] * group["weight_decay"]
        else:
            gradient = gradient + group["weight_decay"] * weight
        parameter.copy_(weight)
        mean.copy_((mean.float() - (1 - beta1) * gradient) / beta1)
        square.copy_((square.float() - (1 - beta2) * gradient.square()).clamp(min=0) / beta2)
        state["step"] -= 1

    def _with_gradients(self) -> list[torch.Tensor]:
        held = (each for group in self.param_groups for each in group["params"])
        return [each for each in held if each.grad is not None]


def _refuse_amsgrad(amsgrad: bool) -> None:
    if amsgrad:
        raise InputError("amsgrad=True is not available: leave it out, or use torch.optim.AdamW")


__getattr__ = attribute_of(__name__)
