"""Flags and JSON keys that mean the same: merged into one value, or an error that names both.

A value given in only one place, command line or file, is used; a key set to "auto" gives none.
Where DeepSpeed's engine would take the file's value whatever the flag says, so is it here.
"""

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from megatron_zpp.settings.capability_flags import CAPABILITIES
from megatron_zpp.settings.command_line import TypedFlag
from megatron_zpp.settings.flag import Flag, SameAs, Section, flags_in
from zeropp import ZeroConfig
from zeropp.errors import InputError
from zeropp.settings import JsonValues, declared

STRATEGIES = MappingProxyType(  # of --data-parallel-sharding-strategy, and their ZeRO stages
    {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}
)
_flag = flags_in("json_flags.toml")
_BF16 = ("bf16", "bfp16", "bfloat16")
_STAGE = "zero_optimization.stage"
_ACCUMULATION = "gradient_accumulation_steps"

log = logging.getLogger("megatron_zpp")


@dataclass(frozen=True, kw_only=True)
class _ZeroFlags(Section):
    """Flags that set JSON keys and nothing else: their values are in `Config.zero`."""

    deepspeed_config: str | None = _flag(None)
    zero_stage: int | None = _flag(None)
    use_distributed_optimizer: bool = _flag(False)
    use_megatron_fsdp: bool = _flag(False)
    data_parallel_sharding_strategy: str = _flag("optim_grads_params", choices=tuple(STRATEGIES))
    use_torch_fsdp2: bool = _flag(False)
    torch_fsdp2_no_reshard_after_forward: bool = _flag(False)
    grad_reduce_in_bf16: bool = _flag(
        False,
        same_as=SameAs(
            "communication_data_type",
            to_flag=lambda name: name in _BF16,
            to_json=lambda is_on: "bf16" if is_on else None,
        ),
    )
    megatron_fsdp_grad_comm_dtype: str = _flag(
        "auto",
        same_as=SameAs(
            "communication_data_type",
            to_flag=lambda name: ("bf" if name in _BF16 else "fp") + name[-2:],
            to_json=lambda name: None if name == "auto" else name,
        ),
    )


@dataclass(frozen=True, kw_only=True)
class ZeroFlags(*declared("JSON_FLAGS", CAPABILITIES), _ZeroFlags):
    """ZeRO: the DeepSpeed JSON, and what Megatron-DeepSpeed's flags say of its keys."""


def merge(
    typed: Mapping[str, TypedFlag], file: JsonValues, flags: Iterable[Flag]
) -> dict[str, Any]:
    """The values of all flags that were typed or whose JSON key is in the file, by flag.

    Raises InputError naming both where they contradict.
    """
    values = {name: assignment.value for name, assignment in typed.items()}
    for flag in flags:
        if flag.same_as is None or file.values.get(flag.same_as.key) is None:
            continue
        key = flag.same_as.key
        value = flag.same_as.flag_value(file.values[key])
        if flag.name in typed and typed[flag.name].value != value:
            if not flag.same_as.key_counts:
                raise _contradiction(typed[flag.name], file.assignment(key))
            counts = f"{file.assignment(key)}, which counts as in Megatron-DeepSpeed"
            log.info("%s has no effect beside %s", typed[flag.name], counts)
        values[flag.name] = value
    _check_same_keys(typed)
    _check_between_settings(typed, file)
    if "fp16.enabled" in file.values and "initial_loss_scale" not in values:
        # A loss scaler that the JSON switches on starts at the JSON's own default, 2^16.
        values["initial_loss_scale"] = 2.0 ** ZeroConfig().fp16.initial_scale_power
    return values


def json_values(values: Mapping[str, Any], flags: Iterable[Flag]) -> dict[str, Any]:
    """The values of flags by JSON key; what the JSON cannot express is left out."""
    result: dict[str, Any] = {}
    for flag in flags:
        if flag.same_as is None or flag.name not in values:
            continue
        value = flag.same_as.to_json(values[flag.name])
        if value is None:
            continue
        key = flag.same_as.key
        if flag.same_as.index is None:
            result[key] = value
        else:
            result[key] = (*result.get(key, ()), value)  # flags are in the order of `index`
    return result


def _check_same_keys(typed: Mapping[str, TypedFlag]) -> None:
    """Raise InputError for two flags that give a key different values."""
    first: dict[tuple[str, int | None], tuple[TypedFlag, Any]] = {}
    for assignment in typed.values():
        same_as = assignment.flag.same_as
        value = None if same_as is None else same_as.to_json(assignment.value)
        if value is None:
            continue
        other, other_value = first.setdefault((same_as.key, same_as.index), (assignment, value))
        if other_value != value:
            raise InputError(f"{other} and {assignment} contradict: keep one")


def _check_between_settings(typed: Mapping[str, TypedFlag], file: JsonValues) -> None:
    """Raise InputError for flags that contradict other flags, or keys of other settings."""
    for name, other in (("fp16", "bf16.enabled"), ("bf16", "fp16.enabled")):
        if name in typed and file.values.get(other):
            raise _contradiction(typed[name], file.assignment(other))
    sharded = typed.get("use_distributed_optimizer")
    stage = typed.get("zero_stage")
    if sharded and stage and stage.value == 0:
        raise _contradiction(sharded, str(stage))
    if sharded and file.values.get(_STAGE) == 0:
        raise _contradiction(sharded, file.assignment(_STAGE))
    for name in ("rampup_batch_size", "step_batch_size_schedule"):
        if name in typed and file.values.get(_ACCUMULATION) is not None:
            raise _contradiction(typed[name], file.assignment(_ACCUMULATION))


def _contradiction(typed: TypedFlag, other: str) -> InputError:
    return InputError(f"{typed} on the command line and {other} contradict: keep one")
