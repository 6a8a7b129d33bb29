"""`deepspeed.ops.adam`: our Adam under DeepSpeed's names, with its defaults."""

from collections.abc import Iterable
from typing import Any

from zeropp.errors import InputError
from zeropp.optim import adam, cpu_adam


class FusedAdam(adam.FusedAdam):
    """Adam, or by default AdamW, with DeepSpeed's arguments; without weight decay by default.

    Raises InputError for `amsgrad`, and as `zeropp.FusedAdam` does.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        *,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        _refuse_amsgrad(amsgrad)
        super().__init__(
            params, lr, betas, eps, weight_decay, adam_w_mode, bias_correction=bias_correction
        )


class DeepSpeedCPUAdam(cpu_adam.CPUAdam):
    """Adam, or by default AdamW, on the CPU, with DeepSpeed's arguments.

    `zeropp.initialize` moves the update to the CPU if the JSON's `offload_optimizer` says so; give
    it the model before it is moved to a GPU. Raises InputError for `amsgrad`, and as
    `zeropp.optim.CPUAdam` does.
    """

    def __init__(
        self,
        model_params: Iterable[Any],
        lr: float = 1e-3,
        *,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
    ) -> None:
        _refuse_amsgrad(amsgrad)
        super().__init__(
            model_params,
            lr,
            bias_correction=bias_correction,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            adamw_mode=adamw_mode,
            fp32_optimizer_states=fp32_optimizer_states,
        )


def _refuse_amsgrad(amsgrad: bool) -> None:
    if amsgrad:
        raise InputError("amsgrad=True is not available: leave it out, or use torch.optim.AdamW")
