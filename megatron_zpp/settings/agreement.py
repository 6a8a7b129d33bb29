"""Where the command line and the DeepSpeed JSON speak of the same thing, and whether they agree.

What was typed and what the file gives must not contradict; what only one of them says holds; what
neither says takes Megatron's default. A key set to "auto" says nothing.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from megatron_zpp.settings.command_line import Assignment
from zeropp.errors import InputError
from zeropp.settings.json_file import read_json, read_sections
from zeropp.settings.schema import shown
from zeropp.settings.zero_config import ZeroConfig


def _same(value: Any) -> Any:
    return value


@dataclass(frozen=True, kw_only=True)
class Twin:
    """A flag and the JSON key of the same meaning.

    `as_flag` and `as_json` translate values; `part` is the position in a key that holds a pair.
    """

    dest: str
    key: str
    as_flag: Callable[[Any], Any] = _same
    as_json: Callable[[Any], Any] = _same
    part: int | None = None

    def of(self, given: Mapping[str, Any]) -> Any:
        """The flag's value by what the file gives."""
        value = given[self.key]
        return self.as_flag(value if self.part is None else value[self.part])


@dataclass(frozen=True, kw_only=True)
class JsonFile:
    """What the file given by `--deepspeed_config` says: values by dotted key, "auto" left out."""

    content: Mapping[str, Any] = field(default_factory=dict)
    given: Mapping[str, Any] = field(default_factory=dict)
    name: str = ""

    @classmethod
    def read(cls, path: str | None) -> "JsonFile":
        """Read the file, if there is one; raises InputError naming the place of a mistake."""
        if path is None:
            return cls()
        content, name = read_json(path)
        try:
            given = read_sections(content, ZeroConfig).values
        except InputError as problem:
            raise InputError(f"{name}: {problem}") from None
        return cls(content=content, given=MappingProxyType(dict(given)), name=name)

    def says(self, key: str) -> str:
        """A key and its value for a message, with the file's name."""
        return f"{key} = {shown(self.given[key])} in {self.name}"


def _loss_scale(value: float) -> float | None:
    return value or None  # the JSON's 0 is a dynamic scale


def _power(scale: float) -> int | None:
    power = math.log2(scale)
    return int(power) if power.is_integer() and power >= 0 else None


_ZERO = "zero_optimization"
_ACCUMULATION = "gradient_accumulation_steps"
_RECOMPUTE = "activation_checkpointing"
TWINS = (
    Twin(dest="zero_stage", key=f"{_ZERO}.stage"),
    Twin(dest="fp16", key="fp16.enabled"),
    Twin(dest="bf16", key="bf16.enabled"),
    Twin(
        dest="loss_scale",
        key="fp16.loss_scale",
        as_flag=_loss_scale,
        as_json=lambda scale: scale or 0.0,
    ),
    Twin(
        dest="initial_loss_scale",
        key="fp16.initial_scale_power",
        as_flag=lambda power: 2.0**power,
        as_json=_power,
    ),
    Twin(dest="min_loss_scale", key="fp16.min_loss_scale"),
    Twin(dest="loss_scale_window", key="fp16.loss_scale_window"),
    Twin(dest="hysteresis", key="fp16.hysteresis"),
    Twin(dest="micro_batch_size", key="train_micro_batch_size_per_gpu"),
    Twin(dest="global_batch_size", key="train_batch_size"),
    Twin(dest="clip_grad", key="gradient_clipping"),
    Twin(
        dest="optimizer", key="optimizer.type", as_flag=lambda _: "adam", as_json=lambda _: "Adam"
    ),
    Twin(dest="lr", key="optimizer.params.lr"),
    Twin(dest="weight_decay", key="optimizer.params.weight_decay"),
    Twin(dest="adam_eps", key="optimizer.params.eps"),
    Twin(dest="adam_beta1", key="optimizer.params.betas", part=0),
    Twin(dest="adam_beta2", key="optimizer.params.betas", part=1),
    Twin(dest="cpu_torch_adam", key="optimizer.params.torch_adam"),
    Twin(
        dest="cpu_optimizer",
        key=f"{_ZERO}.offload_optimizer.device",
        as_flag=lambda device: device == "cpu",
        as_json=lambda is_on: "cpu" if is_on else None,
    ),
    Twin(dest="remote_device", key=f"{_ZERO}.offload_param.device"),
    Twin(dest="use_pin_memory", key=f"{_ZERO}.offload_optimizer.pin_memory"),
    Twin(dest="zero_reduce_scatter", key=f"{_ZERO}.reduce_scatter"),
    Twin(dest="zero_contigious_gradients", key=f"{_ZERO}.contiguous_gradients"),
    Twin(dest="zero_reduce_bucket_size", key=f"{_ZERO}.reduce_bucket_size"),
    Twin(dest="zero_allgather_bucket_size", key=f"{_ZERO}.allgather_bucket_size"),
    Twin(dest="partition_activations", key=f"{_RECOMPUTE}.partition_activations"),
    Twin(dest="contigious_checkpointing", key=f"{_RECOMPUTE}.contiguous_memory_optimization"),
    Twin(dest="checkpoint_in_cpu", key=f"{_RECOMPUTE}.cpu_checkpointing"),
    Twin(dest="synchronize_each_layer", key=f"{_RECOMPUTE}.synchronize_checkpoint_boundary"),
    Twin(dest="profile_backward", key=f"{_RECOMPUTE}.profile"),
)


def agree(typed: Mapping[str, Assignment], file: JsonFile) -> dict[str, Any]:
    """Values by destination of all that was typed or given in the file.

    Raises InputError naming both where they contradict.
    """
    values = {dest: assignment.value for dest, assignment in typed.items()}
    for twin in TWINS:
        if file.given.get(twin.key) is None:
            continue
        given = twin.of(file.given)
        if twin.dest in typed and typed[twin.dest].value != given:
            raise _contradiction(typed[twin.dest], file.says(twin.key))
        values[twin.dest] = given
    _check_precision(typed, file)
    _check_distributed_optimizer(typed, file)
    if "rampup_batch_size" in typed and file.given.get(_ACCUMULATION) is not None:
        raise _contradiction(typed["rampup_batch_size"], file.says(_ACCUMULATION))
    if "fp16.enabled" in file.given and "initial_loss_scale" not in values:
        # The JSON's own default, 2^16, belongs to a loss scaler the JSON switched on.
        values["initial_loss_scale"] = 2.0 ** ZeroConfig().fp16.initial_scale_power
    return values


def json_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON's side of settled values, by dotted key; what it cannot express is left out."""
    settled: dict[str, Any] = {}
    for twin in TWINS:
        value = twin.as_json(values[twin.dest]) if twin.dest in values else None
        if value is None:
            continue
        if twin.part is None:
            settled[twin.key] = value
        else:
            settled[twin.key] = (*settled.get(twin.key, ()), value)
    return settled


def _check_precision(typed: Mapping[str, Assignment], file: JsonFile) -> None:
    for dest, other in (("fp16", "bf16.enabled"), ("bf16", "fp16.enabled")):
        if dest in typed and file.given.get(other):
            raise _contradiction(typed[dest], file.says(other))


def _check_distributed_optimizer(typed: Mapping[str, Assignment], file: JsonFile) -> None:
    sharded = typed.get("use_distributed_optimizer")
    stage = typed.get("zero_stage")
    if sharded and stage and stage.value == 0:
        raise _contradiction(sharded, str(stage))
    if sharded and file.given.get(f"{_ZERO}.stage") == 0:
        raise _contradiction(sharded, file.says(f"{_ZERO}.stage"))


def _contradiction(typed: Assignment, other: str) -> InputError:
    return InputError(f"{typed} on the command line and {other} contradict: keep one")
