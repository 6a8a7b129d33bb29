"""Adam in one pass over memory: unscaling, clipping, the update and the 16-bit copies.

The state is that of `torch.optim.AdamW`, so that each loads the other's checkpoints.
"""

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zeropp.errors import InputError
from zeropp.fsdp_adapter import local_part
from zeropp.optim.adam_op import AdamSettings, Arrays, adam, kernel_for
from zeropp.optim.host_values import HostValues
from zeropp.optim.remap import require_on_shards
from zeropp.optim.sharded_optimizer import ShardedOptimizer

MOMENTS = ("exp_avg", "exp_avg_sq")
# What torch's AdamW has besides, so that each loads what the other saved.
OPTIONS_OF_TORCH = MappingProxyType(
    {
        **dict.fromkeys(("amsgrad", "maximize", "capturable", "differentiable"), False),
        "foreach": None,
        "fused": True,
    }
)
UNAVAILABLE = ("amsgrad", "maximize")  # options that a state dict of torch's may contain
log = logging.getLogger("zeropp")


class Update(NamedTuple):
    """The arguments of one call of the op: tensors of one device, step count and dtype."""

    parameters: list[Tensor]  # as the optimizer holds them
    arrays: Arrays  # this rank's shards
    settings: AdamSettings


class FusedAdam(ShardedOptimizer):
    """Adam, or by default AdamW, on fp32 parameters or this rank's shards of them.

    `copies` maps parameters to bf16 or fp16 tensors of their local shape, to which each step also
    writes the new weights. Raises InputError for parameters that are not fp32 and for values out of
    range. Sources: Kingma and Ba, arXiv:1412.6980; Loshchilov and Hutter, arXiv:1711.05101.
    """

    parameter_dtypes: tuple[torch.dtype, ...] = (torch.float32,)
    moment_dtype = torch.float32
    seed = 0  # of the random bits that round moments in bf16

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        adam_w_mode: bool = True,
        bias_correction: bool = True,
        *,
        copies: Mapping[Tensor, Tensor] | None = None,
    ) -> None:
        self.bias_correction = bias_correction
        self.copies = dict(copies or {})
        self._counted: list[Tensor] = []  # step counts that the last step incremented
        self._factor: HostValues | None = None  # of the last step
        options = dict(
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            decoupled_weight_decay=adam_w_mode,
        )
        super().__init__(params, options | OPTIONS_OF_TORCH)

    @property
    def adam_w_mode(self) -> bool:
        """Whether weight decay is decoupled, as in AdamW."""
        return self.defaults["decoupled_weight_decay"]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as every optimizer does; raises InputError as the constructor does."""
        super().add_param_group(param_group)
        try:
            _check(self.param_groups[-1], self.parameter_dtypes)
        except InputError:
            self.param_groups.pop()
            raise

    @torch.no_grad()
    def step(
        self, closure: Callable[[], Any] | None = None, *, factor: Tensor | None = None
    ) -> Any:
        """Update every parameter that has a gradient; return the result of `closure`.

        factor: a 0-d fp32 tensor on the parameters' device, by which gradients are multiplied as
        they are read. If it is not finite, no tensor changes. The host does not wait to find out:
        step counts are corrected when they are next used. Raises InputError during the capture of a
        CUDA graph.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise InputError(
                "FusedAdam counts its steps on the host, and a CUDA graph would repeat the same "
                "one: call step() after the replay"
            )
        self.await_gradients()
        self.settle()
        updates = [
            update
            for number, group in enumerate(self.param_groups)
            for update in self._updates(group, self.seed + number)
        ]
        self._apply(updates, factor)
        if self._counted:
            torch._foreach_add_(self._counted, 1.0)
        self._factor = None if factor is None else HostValues(factor)
        return loss

    def state_dict(self) -> dict[str, Any]:
        """Return the state, as every optimizer does, after the last step has finished."""
        self.settle()
        return super().state_dict()

    def __getstate__(self) -> dict[str, Any]:
        self.settle()
        own = ("bias_correction", "copies", "moment_dtype", "seed", "_counted", "_factor")
        return super().__getstate__() | {name: getattr(self, name) for name in own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Load a state, which may come from torch's AdamW.

        torch's fused kernels keep step counts on the device, and torch loads moments in the
        parameters' dtype; both are converted. Raises InputError for another optimizer's state.
        """
        super().__setstate__(state)
        for group in self.param_groups:
            group.setdefault("decoupled_weight_decay", True)
            _check(group, self.parameter_dtypes)
        for parameter, entries in self.state.items():
            if entries:
                self._take_loaded(parameter, entries)

    def _take_loaded(self, parameter: Tensor, entries: dict[str, Any]) -> None:
        """Bring a parameter's loaded state into the form that it has here."""
        _require_adam_state(entries)
        entries["step"] = torch.tensor(float(entries["step"]), dtype=torch.float32, device="cpu")
        entries |= {name: entries[name].to(self.moment_dtype) for name in MOMENTS}

    def settle(self) -> None:
        """Wait until parameters and state are those after the last step.

        If that step was skipped, its step counts are decremented.
        """
        if self._counted and self._factor and not math.isfinite(self._factor.values[0]):
            torch._foreach_sub_(self._counted, 1.0)
        self._counted, self._factor = [], None

    def _updates(self, group: dict[str, Any], seed: int) -> Iterable[Update]:
        """Group parameters with a gradient by device, step count and dtypes, one call for each."""
        calls: dict[tuple, Update] = {}
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            state = self._state_of(parameter)
            self._counted.append(state["step"])
            tensors = [parameter, parameter.grad, *(state[name] for name in MOMENTS)]
            if parameter in self.copies:
                tensors.append(self.copies[parameter])
            shards = [local_part(tensor) for tensor in tensors]
            if not shards[0].numel():
                continue
            if shards[0].dtype != torch.float32:  # updated in fp32, and rounded as a copy is
                shards = [shards[0].float(), *shards[1:], shards[0]]
            step = int(state["step"]) + 1
            key = step, shards[0].device, *(shard.dtype for shard in shards)
            if key not in calls:
                settings = self._settings(group, step, seed)
                calls[key] = Update([], Arrays([], [], [], [], []), settings)
            calls[key].parameters.append(parameter)
            for array, shard in zip(calls[key].arrays, _in_memory_order(shards), strict=False):
                array.append(shard)
        return calls.values()

    def _apply(self, updates: Sequence[Update], factor: Tensor | None) -> None:
        for update in updates:
            adam(update.arrays, factor, update.settings)

    def _settings(self, group: dict[str, Any], step: int, seed: int) -> AdamSettings:
        beta1, beta2 = group["betas"]
        return AdamSettings(
            lr=float(group["lr"]),
            beta1=float(beta1),
            beta2=float(beta2),
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            step=step,
            decoupled=group["decoupled_weight_decay"],
            corrected=self.bias_correction,
            seed=seed,
        )

    def _state_of(self, parameter: Tensor) -> dict[str, Tensor]:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device="cpu")
            for name in MOMENTS:
                state[name] = torch.zeros_like(
                    parameter, dtype=self.moment_dtype, memory_format=torch.preserve_format
                )
        return state


def fastest_adamw(
    parameters: Iterable[Any],
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    adam_w_mode: bool = True,
    bias_correction: bool = True,
    torch_on_cpu: bool = False,
    kind: type[FusedAdam] = FusedAdam,
) -> torch.optim.Optimizer:
    """Return AdamW for parameters or groups: a `FusedAdam` if its kernel is built, else torch's.

    With `torch_on_cpu`, torch's is used on CPUs. Without `adam_w_mode` it is Adam. The choice is
    logged at INFO. Raises InputError for what torch's lacks if that is to be used.
    """
    groups = list(parameters)
    settings = dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
    reason = _why_not_fused(groups, torch_on_cpu)
    if reason is None:
        log.info("AdamW: zeropp's, one kernel to unscale, clip and update")
        return kind(groups, **settings, adam_w_mode=adam_w_mode, bias_correction=bias_correction)
    if not bias_correction:
        raise InputError(
            f"bias_correction = false, and PyTorch's Adam, which is used ({reason}), has a bias "
            "correction: leave it out"
        )
    log.info("AdamW: PyTorch's, fused (%s)", reason)
    torchs = torch.optim.AdamW if adam_w_mode else torch.optim.Adam
    optimizer = torchs(groups, **settings, fused=True)
    require_on_shards(optimizer)
    return optimizer


def parameters_in(parameters_or_groups: Iterable[Any]) -> list[Any]:
    """Return all parameters, without the names that `named_parameters` puts before them."""
    items = []
    for item in parameters_or_groups:
        items += item["params"] if isinstance(item, Mapping) else [item]
    return [item[1] if isinstance(item, tuple) else item for item in items]


def _why_not_fused(groups: list[Any], torch_on_cpu: bool) -> str | None:
    parameters = parameters_in(groups)
    devices = {parameter.device.type for parameter in parameters}
    if len(devices) != 1 or not devices <= {"cpu", "cuda"}:
        return f"weights on {' and '.join(sorted(devices))}; ours takes one of CPU and GPU"
    if torch_on_cpu and devices == {"cpu"}:
        return "as requested"
    if any(parameter.dtype != torch.float32 for parameter in parameters):
        return "not all weights are fp32"
    if kernel_for(parameters[0].device) is None:
        return f"ours is not built for this {'CPU' if devices == {'cpu'} else 'GPU'}"
    return None


def _in_memory_order(tensors: list[Tensor]) -> list[Tensor]:
    """Permute a parameter, its gradient, moments and copy to the parameter's order of strides."""
    parameter, gradient, *others = tensors
    if not parameter.is_contiguous():
        dims = sorted(range(parameter.ndim), key=parameter.stride, reverse=True)
        parameter, gradient, *others = (tensor.permute(dims) for tensor in tensors)
    return [parameter, gradient.contiguous(), *others]


def _require_adam_state(state: Mapping[str, Any]) -> None:
    expected = ("step", *MOMENTS)
    if not state.keys() >= set(expected):
        raise InputError(
            f"the optimizer's state holds {', '.join(state)}, and Adam's is {', '.join(expected)}: "
            "it is another optimizer's; load the weights without it"
        )


def _check(group: Mapping[str, Any], dtypes: Sequence[torch.dtype]) -> None:
    for name in UNAVAILABLE:
        if group.get(name):
            raise InputError(f"FusedAdam has no {name}; leave it out, or use torch.optim.AdamW")
    ranges = {name: float(group[name]) for name in ("lr", "eps", "weight_decay")}
    wrong = [f"{name} = {value}" for name, value in ranges.items() if not 0.0 <= value < 1e38]
    wrong += [f"betas = {group['betas']}"] * (not all(0.0 <= beta < 1.0 for beta in group["betas"]))
    if wrong:
        raise InputError(
            f"FusedAdam cannot run with {', '.join(wrong)}: lr, eps and weight_decay are 0 or more "
            "and finite, betas at least 0 and below 1"
        )
    for parameter in group["params"]:
        if parameter.dtype not in dtypes:
            raise InputError(
                f"FusedAdam updates fp32 parameters, and one of shape {list(parameter.shape)} is "
                f"{parameter.dtype}: keep the weights in fp32 (model.float()) and compute in 16 "
                'bit through the JSON ("bf16": {"enabled": true}), or use torch.optim.AdamW'
            )
