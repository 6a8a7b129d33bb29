"""`deepspeed.runtime.config`: the JSON as an object."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from types import MappingProxyType
from typing import Any

from zeropp.errors import InputError, RefusedCall
from zeropp.ranks.coordination import world_size
from zeropp.settings.deepspeed_json import all_keys, build, read_json
from zeropp.settings.rules import BATCH_KEYS
from zeropp.settings.sections import OPTIMIZERS, Bf16, Fp16, ZeroOptimization
from zeropp.settings.zero_config import ZeroConfig

ADAM_OPTIMIZER, ADAMW_OPTIMIZER, ADAGRAD_OPTIMIZER, _, LION_OPTIMIZER, MUON_OPTIMIZER = map(
    str.lower, OPTIMIZERS
)
_PLACES = MappingProxyType(  # of attributes with names of their own
    {
        "bfloat16_config": "bf16",
        "float16_config": "fp16",
        "optimizer_name": "optimizer.type",
        "optimizer_params": "optimizer.params",
        "scheduler_name": "scheduler.type",
        "scheduler_params": "scheduler.params",
        "zero_config": "zero_optimization",
        "zero_optimization_stage": "stage",
        "zero_enabled": "stage",
    }
)


@contextmanager
def as_refusals() -> Iterator[None]:
    """Raise what DeepSpeed refuses by assertions as AssertionErrors, too."""
    try:
        yield
    except InputError as error:
        raise RefusedCall(str(error)) from error


class DeepSpeedConfig:
    """A JSON by DeepSpeed's names, with the sizes of a step on all ranks.

    Raises InputError as `zeropp.ZeroConfig.from_json` does, and for sizes that do not fit.
    """

    def __init__(self, config: Mapping | Path | str, mpu: Any = None, mesh_device: Any = None):
        with as_refusals():
            self._config = ZeroConfig.from_json(config)
        self._param_dict = self._config.to_dict()
        self.world_size = world_size()
        for name in BATCH_KEYS:
            setattr(self, name, self._config.value(name))
        self._configure_train_batch_size()

    def __getattr__(self, name: str) -> Any:
        return attrgetter(_PLACES.get(name, name))(self.__dict__["_config"])

    def _configure_train_batch_size(self) -> None:
        with as_refusals():
            given = replace(self._config, **{name: getattr(self, name) for name in BATCH_KEYS})
            sizes = given.resolve_batch(self.world_size)
        self.train_batch_size, self.train_micro_batch_size_per_gpu = sizes[:2]
        self.gradient_accumulation_steps = sizes.micro_batches


class DeepSpeedZeroConfig:
    """The section `zero_optimization`, by names with or without `stage3_`."""

    def __init__(self, **values: Any) -> None:
        with as_refusals():
            read = read_json({"zero_optimization": values}, ZeroConfig).values
            self._section = build(ZeroOptimization, read, "zero_optimization.")
        self._given, self._values = values, read

    def __getattr__(self, name: str) -> Any:
        for key in (f"zero_optimization.{name}", f"zero_optimization.stage3_{name}"):
            if (entry := all_keys(ZeroConfig).get(key)) is None:
                continue
            default = False if entry.type is bool else None
            value = getattr(self._section, entry.name, self._values.get(key, default))
            is_left_out = entry.subsection and value == entry.default
            return None if is_left_out and self._given.get(name) is None else value
        raise AttributeError(f"zero_optimization has no key {name!r}")


def get_bfloat16_config(param_dict: Mapping[str, Any]) -> Bf16:
    """Return the section `bf16` of a JSON."""
    return ZeroConfig.from_json(param_dict).bf16


def get_float16_config(param_dict: Mapping[str, Any]) -> Fp16:
    """Return the section `fp16` of a JSON."""
    return ZeroConfig.from_json(param_dict).fp16


def get_gradient_clipping(param_dict: Mapping[str, Any]) -> float:
    """Return the norm to which a JSON says that gradients are clipped; 0: they are not."""
    return ZeroConfig.from_json(param_dict).gradient_clipping
