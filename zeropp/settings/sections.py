"""The sections of a DeepSpeed JSON, with the keys that are honoured.

`key(default, ...)` declares a key, with the values that it may have. Keys that change nothing are
in `no_effect.toml` and `refused.toml`; which parameters optimizers and schedules have is in
`parameters.toml`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

from zeropp.errors import InputError
from zeropp.exports import keys_of
from zeropp.settings.json_keys import JsonSection, NoEffect, key, needs
from zeropp.settings.no_effect_tables import read_toml
from zeropp.settings.schema import settings_of

BITS = (4, 8, 16)
GRADIENT_BITS = (3, *BITS)
FORMATS: Mapping[str, str] = MappingProxyType(  # torch's name of each
    {
        "fp32": "float32",
        "float32": "float32",
        "fp16": "float16",
        "float16": "float16",
        "bf16": "bfloat16",
        "bfp16": "bfloat16",
        "bfloat16": "bfloat16",
        **{f"torch.{name}": name for name in ("float32", "float16", "bfloat16")},
    }
)


@dataclass(frozen=True, kw_only=True)
class _ZeroOptimization(JsonSection):
    path: ClassVar[str] = "zero_optimization"

    stage: int = key(0, choices=(0, 1, 2, 3))
    zero_quantized_weights: bool = key(False)
    zero_hpz_partition_size: int = key(1, minimum=1)
    zero_quantized_gradients: bool = key(False)


@dataclass(frozen=True, kw_only=True)
class ZeroOptimization(*reversed(keys_of("zero_optimization")), _ZeroOptimization):
    stage3_gather_16bit_weights_on_model_save: bool = key(False)


@dataclass(frozen=True, kw_only=True)
class Fp16(JsonSection):
    path: ClassVar[str] = "fp16"

    enabled: bool = key(False, auto=True)
    loss_scale: float = key(0.0, minimum=0, auto=True)  # 0 means dynamic
    initial_scale_power: int = key(16, minimum=0, maximum=127, auto=True)
    loss_scale_window: int = key(1000, minimum=1, auto=True)  # steps without overflow
    hysteresis: int = key(2, minimum=1, auto=True)
    consecutive_hysteresis: bool = key(False)
    min_loss_scale: float = key(1.0, minimum=0, auto=True)


@dataclass(frozen=True, kw_only=True)
class Bf16(JsonSection):
    """With `check_grad_overflow`, steps whose gradients are not finite are skipped, not errors."""

    path: ClassVar[str] = "bf16"

    enabled: bool = key(False, auto=True)
    check_grad_overflow: bool = key(False, no_effect=needs("bf16.enabled"))


@dataclass(frozen=True, kw_only=True)
class TorchAutocast(JsonSection):
    """`torch.autocast` around the forward passes of an engine, whose weights stay in fp32."""

    path: ClassVar[str] = "torch_autocast"

    enabled: bool = key(False)
    dtype: str | None = key(None, choices=tuple(FORMATS), no_effect=needs("torch_autocast.enabled"))


_TABLE = MappingProxyType(read_toml(__package__, "parameters.toml"))
OPTIMIZERS: Mapping[str, Sequence[str]] = MappingProxyType(_TABLE["optimizers"])
SCHEDULES: Mapping[str, Sequence[str]] = MappingProxyType(_TABLE["schedules"])


@dataclass(frozen=True, kw_only=True)
class _Named(JsonSection):
    """A section with a type and the parameters of all types."""

    taken: ClassVar[Mapping[str, Sequence[str]]] = MappingProxyType({})
    always_taken: ClassVar[tuple[str, ...]] = ()

    def arguments(self) -> dict[str, Any]:
        """Return the parameters of the type that have values.

        Raises InputError for parameters of other types, and without those that the type needs.
        """
        names = (*self.taken[self.type], *self.always_taken)
        arguments = {}
        for entry in settings_of(type(self.params)):
            value = self.params.value(entry.name)
            if entry.name in names:
                arguments[entry.name] = value
            elif value != entry.default:
                raise InputError(
                    f'{entry.assignment(value)}: {self.path}.type = "{self.type}" takes '
                    f"{', '.join(names)}"
                )
        arguments = {name: value for name, value in arguments.items() if value is not None}
        for name in _TABLE["needed"].get(self.type, ()):
            if name not in arguments:
                needed = f"{self.path}.params.{name}"
                raise InputError(f'{self.path}.type = "{self.type}" needs {needed}')
        return arguments


@dataclass(frozen=True, kw_only=True)
class OptimizerParams(*keys_of("optimizer.params"), JsonSection):
    path: ClassVar[str] = "optimizer.params"

    lr: float | None = key(None, minimum=0, auto=True)
    betas: tuple[float, float] | None = key(None, minimum=0, maximum=1, auto=True)
    eps: float | None = key(None, minimum=0, auto=True)
    weight_decay: float | None = key(None, minimum=0, auto=True)
    torch_adam: bool = key(False)  # on CPUs
    adam_w_mode: bool = key(  # false: weight decay is part of the gradient
        True,
        no_effect=NoEffect('it needs optimizer.type "Adam"', lambda c: c.optimizer.type != "Adam"),
    )
    bias_correction: bool = key(True)
    momentum: float | None = key(None, minimum=0)
    dampening: float | None = key(None)
    nesterov: bool | None = key(None)
    ns_steps: int | None = key(None, minimum=1, maximum=99)
    lr_decay: float | None = key(None, minimum=0)
    initial_accumulator_value: float | None = key(None, minimum=0)


@dataclass(frozen=True, kw_only=True)
class Optimizer(_Named):
    """`Adam` and `AdamW` are the same, as in DeepSpeed: `adam_w_mode` tells them apart."""

    path: ClassVar[str] = "optimizer"
    taken = OPTIMIZERS

    type: str | None = key(None, choices=tuple(OPTIMIZERS))
    params: OptimizerParams = key(OptimizerParams())


@dataclass(frozen=True, kw_only=True)
class SchedulerParams(JsonSection):
    path: ClassVar[str] = "scheduler.params"

    warmup_min_lr: float = key(0.0, minimum=0, auto=True)
    warmup_max_lr: float | None = key(None, minimum=0, auto=True)
    warmup_num_steps: int = key(1000, minimum=0, auto=True)
    warmup_type: str = key("log", choices=("log", "linear"), auto=True)
    warmup_min_ratio: float = key(0.0, minimum=0, maximum=1, auto=True)
    cos_min_ratio: float = key(0.0001, minimum=0, maximum=1, auto=True)
    total_num_steps: int | None = key(None, minimum=1, auto=True)
    last_batch_iteration: int = key(-1, minimum=-1)
    lr_range_test_min_lr: float = key(1e-3, minimum=0)
    lr_range_test_step_size: int = key(2000, minimum=1)
    lr_range_test_step_rate: float = key(1.0, minimum=0)
    lr_range_test_staircase: bool = key(False)
    cycle_min_lr: float | None = key(None, minimum=0)
    cycle_max_lr: float | None = key(None, minimum=0)
    decay_lr_rate: float = key(0.0, minimum=0)
    cycle_first_step_size: int = key(2000, minimum=1)
    cycle_second_step_size: int | None = key(None, minimum=0)
    cycle_first_stair_count: int = key(0, minimum=0)
    cycle_second_stair_count: int | None = key(None, minimum=0)
    decay_step_size: int = key(0, minimum=0)
    cycle_momentum: bool = key(True)
    cycle_min_mom: float = key(0.8, minimum=0, maximum=1)
    cycle_max_mom: float = key(0.9, minimum=0, maximum=1)
    decay_mom_rate: float = key(0.0, minimum=0)


@dataclass(frozen=True, kw_only=True)
class Scheduler(_Named):
    path: ClassVar[str] = "scheduler"
    taken = SCHEDULES
    always_taken = ("last_batch_iteration",)

    type: str | None = key(None, choices=tuple(SCHEDULES))
    params: SchedulerParams = key(SchedulerParams())


@dataclass(frozen=True, kw_only=True)
class Zeropp(*keys_of("zeropp"), JsonSection):
    """What DeepSpeed's JSON cannot say.

    A node is `ranks_per_node` ranks, as launched by default. `gradient_bits` is [within a node,
    across nodes]. `code_messages`: what crosses nodes quantized is coded to its entropy, without
    loss; null, or "auto", where that takes less time.
    `secondary_in_evaluation`: passes in eval() mode keep hpZ's copies, as training does.
    `reduce_gradients_once`: ranks accumulate whole gradients and average them at the end of a step,
    as stages 0 and 1 do.
    """

    path: ClassVar[str] = "zeropp"

    ranks_per_node: int | None = key(None, minimum=1)
    weight_bits: int = key(
        8, choices=BITS, no_effect=needs("zero_optimization.zero_quantized_weights")
    )
    gradient_bits: tuple[int, int] = key(
        (8, 4), choices=GRADIENT_BITS, no_effect=needs("zero_optimization.zero_quantized_gradients")
    )
    code_messages: bool | None = key(None, auto=True)
    secondary_in_evaluation: bool = key(True)
    reduce_gradients_once: bool = key(
        False, no_effect=NoEffect("stages 0 and 1 do so anyway", when=lambda c: c.stage < 2)
    )
