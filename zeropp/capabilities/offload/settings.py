"""The keys of ZeRO-Offload in the JSON, which of them contradict each other, and old names."""

from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, ClassVar

from zeropp.settings.json_keys import JsonSection, NoEffect, key, needs
from zeropp.settings.placement import Placed, Placement
from zeropp.settings.schema import Rule

_ZERO = "zero_optimization."
_STAGE = _ZERO + "stage"
_WEIGHTS_ON = _ZERO + "offload_param.device"
_OPTIMIZER_ON = _ZERO + "offload_optimizer.device"
_DEVICE = {True: "cpu", False: "none"}
_NVME = 'offload to NVMe is not available here; "cpu" and "none" are'
_FORMATS = ("fp32", "fp16", "bf16")
_device = partial(key, "none", choices=("none", "cpu"), refused={"nvme": _NVME})


@dataclass(frozen=True, kw_only=True)
class OffloadParam(JsonSection):
    path: ClassVar[str] = "zero_optimization.offload_param"

    device: str = _device(
        no_effect=NoEffect(
            "only stage 3 shards the weights that would be moved to the CPU",
            when=lambda c: c.stage != 3,
        )
    )
    pin_memory: bool = key(False, no_effect=needs(_WEIGHTS_ON))


@dataclass(frozen=True, kw_only=True)
class OffloadOptimizer(JsonSection):
    path: ClassVar[str] = "zero_optimization.offload_optimizer"

    device: str = _device()
    pin_memory: bool = key(False, no_effect=needs(_OPTIMIZER_ON))
    ratio: float = key(1.0, minimum=0, maximum=1, no_effect=needs(_OPTIMIZER_ON))


@dataclass(frozen=True, kw_only=True)
class DataTypes(JsonSection):
    """`grad_accum_dtype`: the gradients of an offloaded optimizer; all others are in fp32."""

    path: ClassVar[str] = "data_types"

    grad_accum_dtype: str | None = key(None, choices=_FORMATS, no_effect=needs(_OPTIMIZER_ON))


@dataclass(frozen=True, kw_only=True)
class Offloads(JsonSection):
    path: ClassVar[str] = "zero_optimization"

    offload_param: OffloadParam = key(OffloadParam())
    offload_optimizer: OffloadOptimizer = key(OffloadOptimizer())


@dataclass(frozen=True, kw_only=True)
class DelayedUpdate(JsonSection):
    """`delayed_param_update`: the host's update runs beside the next step, which computes with the
    weights before it; not in the first `delayed_param_update_warmup` steps.
    """

    path: ClassVar[str] = "zeropp"

    delayed_param_update: bool = key(False)
    delayed_param_update_warmup: int = key(
        40, minimum=0, no_effect=needs("zeropp.delayed_param_update")
    )


@dataclass(frozen=True, kw_only=True)
class Offloaded(Placed, JsonSection):
    """What the configuration says of all these keys."""

    data_types: DataTypes = key(DataTypes())

    @property
    def offloads_optimizer(self) -> bool:
        """Whether fp32 weights, moments and the step are on the host."""
        return "offload_optimizer" in self.placement.keys

    @property
    def offloads_weights(self) -> bool:
        """Whether the shards are on the host; in 16 bit if the optimizer is offloaded as well."""
        return self.placement.weights is not None

    @property
    def masters(self) -> dict[str, Any]:
        """The arguments of `Offload`."""
        placed, delayed = self.zero_optimization.offload_optimizer, self.zeropp.delayed_param_update
        gradients = {"gradient_type": self.data_types.grad_accum_dtype or "fp32"}
        return dict(ratio=placed.ratio, pin_memory=placed.pin_memory, delayed=delayed) | gradients

    @cached_property
    def placement(self) -> Placement:
        """Where ranks keep their shards."""
        zero = self.zero_optimization
        optimizer = zero.offload_optimizer.device == "cpu"
        weights = zero.offload_param.device == "cpu" and zero.stage == 3
        return Placement(
            weights="cpu" if weights else None,
            trained_on_cpu=zero.offload_optimizer.ratio if optimizer else float(weights),
            is_pinned=zero.offload_param.pin_memory,
            keys=("offload_optimizer",) * optimizer + ("offload_param",) * weights,
        )


KEYS = (Offloads, DelayedUpdate, Offloaded)
RULES = (
    Rule(
        (_OPTIMIZER_ON, _STAGE),
        lambda device, stage: device != "none" and stage == 0,
        "{} and {}: offload moves a rank's shard to the CPU; stage 0 has none, and stages 1, 2 "
        "and 3 have one",
    ),
    Rule(
        (_WEIGHTS_ON, _ZERO + "offload_optimizer.ratio", _STAGE),
        lambda device, ratio, stage: device == "cpu" and ratio < 1 and stage == 3,
        "{} and {}: a part of the optimizer on the device needs its weights there",
    ),
    Rule(
        (_ZERO + "zero_quantized_nontrainable_weights", _WEIGHTS_ON, _STAGE),
        lambda stored, device, stage: stored and device == "cpu" and stage == 3,
        "{} and {}: frozen weights that are stored quantized stay on the device",
    ),
    Rule(
        ("zeropp.delayed_param_update", "zeropp.sync_every"),
        lambda delayed, interval: delayed and interval != 1,
        "{} and {}: replicas synchronize their weights after an update, and a delayed one is "
        "not done then: leave one out",
    ),
    Rule(
        ("zeropp.delayed_param_update", _OPTIMIZER_ON),
        lambda delayed, device: delayed and device != "cpu",
        "{} and {}: the delayed update runs on the CPU, so it needs the optimizer there",
    ),
)
OLD_NAMES = {  # today's names, and what true and false mean
    f"{_ZERO}cpu_offload": ((_OPTIMIZER_ON,), _DEVICE),
    f"{_ZERO}cpu_offload_param": ((_WEIGHTS_ON,), _DEVICE),
    f"{_ZERO}cpu_offload_use_pin_memory": (
        (f"{_ZERO}offload_optimizer.pin_memory", f"{_ZERO}offload_param.pin_memory"),
        {True: True, False: False},
    ),
}
