"""`ZeroConfig`: the whole DeepSpeed JSON, read strictly and frozen.

Nothing is ignored silently: a key is honoured, or a notice says why it has no effect, or
constructing the configuration raises `InputError`. The keys that are honoured are in
`zeropp.settings.sections`, those that change nothing in `no_effect.toml` and `refused.toml`, how
the text is read in `zeropp.settings.deepspeed_json`, and which keys contradict each other in
`zeropp.settings.rules`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from operator import attrgetter
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

from zeropp.errors import InputError
from zeropp.exports import keys_of
from zeropp.settings.deepspeed_json import (
    OLD_NAMES,
    JsonValues,
    all_keys,
    build,
    read_json,
    unknown_key,
)
from zeropp.settings.json_keys import JsonSection, Key, NoEffect, key
from zeropp.settings.no_effect_tables import keys_without_effect
from zeropp.settings.placement import Placed
from zeropp.settings.rules import BATCH_KEYS, RULES
from zeropp.settings.schema import no_effect_line
from zeropp.settings.sections import (
    FORMATS,
    Bf16,
    Fp16,
    Optimizer,
    Scheduler,
    TorchAutocast,
    ZeroOptimization,
    Zeropp,
)

_FP32_MEAN = NoEffect("stage 0 averages whole gradients in fp32", when=lambda c: c.stage == 0)


class BatchSizes(NamedTuple):
    """Samples of a step on all ranks, samples of a micro-batch on one, micro-batches of a step."""

    samples: int
    micro_samples: int
    micro_batches: int


@dataclass(frozen=True, kw_only=True)
class _TopLevel(JsonSection):
    path: ClassVar[str] = ""

    train_batch_size: int | None = key(None, minimum=1, auto=True)  # samples
    train_micro_batch_size_per_gpu: int | None = key(None, minimum=1, auto=True)  # samples
    gradient_accumulation_steps: int | None = key(None, minimum=1, auto=True)
    managed_gradient_accumulation: bool = key(True)  # false: each engine.step() ends one
    gradient_allreduce_op: str = key("mean", choices=("mean", "sum"))
    gradient_clipping: float = key(0.0, minimum=0, auto=True)  # 0 means none
    communication_data_type: str | None = key(None, choices=tuple(FORMATS), no_effect=_FP32_MEAN)
    zero_optimization: ZeroOptimization = key(ZeroOptimization())
    zeropp: Zeropp = key(Zeropp())
    fp16: Fp16 = key(Fp16())
    bf16: Bf16 = key(Bf16())
    torch_autocast: TorchAutocast = key(TorchAutocast())
    optimizer: Optimizer = key(Optimizer())
    scheduler: Scheduler = key(Scheduler())


@dataclass(frozen=True, kw_only=True)
class ZeroConfig(*keys_of(""), Placed, _TopLevel):
    """The top level of the JSON; `ZeroConfig()` is ZeRO stage 0 in fp32.

    `file_keys` are the dotted keys that a file gave a value; `auto_keys` are those it set to "auto"
    and that have not been given a value since; `old_names` are the outdated names it used;
    `idle_values` are the values of keys that change nothing, by dotted key, and `others` those of
    keys that are not DeepSpeed's. Raises `InputError` for values out of range and for values that
    contradict each other.
    """

    rules = RULES

    steps_per_print: int | None = key(None, minimum=1, infinity_is_null=True)

    idle_values: Mapping[str, Any] = field(default_factory=dict, hash=False)
    others: Mapping[str, Any] = field(default_factory=dict, hash=False)
    file_keys: frozenset[str] = frozenset()
    auto_keys: frozenset[str] = frozenset()
    old_names: tuple[str, ...] = ()
    source: str = field(default="configuration", compare=False)

    @classmethod
    def from_json(
        cls, source: Path | str | Mapping, defaults: Mapping[str, Any] = MappingProxyType({})
    ) -> "ZeroConfig":
        """The configuration in a file, a JSON text or a mapping.

        `defaults` are values by dotted key for keys that the source leaves out or sets to "auto";
        `None` stands for no default. Raises `InputError` naming the place and what to do.
        """
        return cls.from_values(read_json(source, cls), defaults)

    @classmethod
    def from_values(
        cls, file: JsonValues, defaults: Mapping[str, Any] = MappingProxyType({})
    ) -> "ZeroConfig":
        """The configuration in a JSON that has been read, as `from_json` makes it."""
        filled = {
            name: value
            for name, value in defaults.items()
            if value is not None and name not in file.values
        }
        for dotted in filled.keys() - _value_keys().keys():
            raise unknown_key(dotted, cls)
        values = {**filled, **file.values}
        try:
            config = build(cls, values)
        except InputError as error:
            raise InputError(f"{file.source}: {error}") from None
        idle = keys_without_effect()
        return replace(
            config,
            idle_values={name: value for name, value in values.items() if name in idle},
            others=file.others,
            file_keys=frozenset(file.values),
            auto_keys=file.auto_keys - filled.keys(),
            old_names=file.old_names,
            source=file.source,
        )

    @property
    def stage(self) -> int:
        """The ZeRO stage, 0 to 3."""
        return self.zero_optimization.stage

    @property
    def always_gathers(self) -> bool:
        """Whether one rank gathers too, as shards are kept elsewhere than used, or as codes."""
        return self.placement.weights is not None or self.placement.frozen_bits is not None

    @property
    def reduces_once(self) -> bool:
        """Whether gradients are averaged once per step, whole ones accumulated until then."""
        return self.stage < 2 or self.zeropp.reduce_gradients_once

    @property
    def compute_format(self) -> str:
        """What forward and backward compute in, as torch calls it."""
        if self.fp16.enabled:
            return "float16"
        return "bfloat16" if self.bf16.enabled else "float32"

    @property
    def autocast_format(self) -> str | None:
        """What `torch.autocast` computes in around an engine's forward passes; None without it."""
        if not self.torch_autocast.enabled:
            return None
        return FORMATS[self.torch_autocast.dtype or "bf16"]

    def without_engine(self) -> "ZeroConfig":
        """The same without what engines add to a sharded model."""
        return replace(
            self,
            gradient_allreduce_op="mean",
            managed_gradient_accumulation=True,
            torch_autocast=TorchAutocast(),
        )

    @property
    def loss_scaling(self) -> Fp16:
        """The section that says how losses are scaled: float16 of any kind has a scale."""
        is_fp16 = self.fp16.enabled or self.autocast_format == "float16"
        return replace(self.fp16, enabled=is_fp16)

    @property
    def wire_format(self) -> str:
        """What unquantized collectives send, as torch calls it."""
        named = self.communication_data_type
        return self.compute_format if named is None else FORMATS[named]

    @property
    def unresolved_auto_keys(self) -> tuple[str, ...]:
        """Keys left to "auto" that `zeropp.initialize` needs; it can work out the batch sizes."""
        return tuple(
            dotted
            for dotted, entry in all_keys(ZeroConfig).items()
            if dotted in self.auto_keys
            and dotted not in (*BATCH_KEYS, "zeropp.code_messages")
            and not entry.why_no_effect(self)
        )

    def notices(
        self,
        reasons: Mapping[str, str] = MappingProxyType({}),
        others: Mapping[str, str] = MappingProxyType({}),
    ) -> tuple[str, ...]:
        """A line for each key in the file that has an old name, and one for all without effect.

        `reasons` are those of a program which does not honour all that `zeropp.initialize` does, by
        dotted key; they come before the general ones. `others` are further settings of the program
        without effect, and why.
        """
        lines = [
            f"{old} is an old name of {' and '.join(OLD_NAMES[old][0])}" for old in self.old_names
        ]
        ignored = {**others, **dict.fromkeys(self.others, "no key of DeepSpeed's has this name")}
        given = self.file_keys | self.auto_keys
        ignored_sections: tuple[str, ...] = ()
        for dotted, entry in all_keys(ZeroConfig).items():
            is_given = any(f"{name}.".startswith(f"{dotted}.") for name in given)
            if dotted.startswith(ignored_sections) or not is_given:
                continue
            reason = reasons.get(dotted) or entry.why_no_effect(self)
            if reason:
                ignored[dotted] = reason
                ignored_sections += (f"{dotted}.",)
        return (*lines, no_effect_line(ignored)) if ignored else tuple(lines)

    @classmethod
    def setting(cls, dotted: str) -> Key:
        """A key by its dotted name; raises `InputError` for one that does not exist."""
        if dotted not in all_keys(ZeroConfig):
            raise unknown_key(dotted, ZeroConfig)
        return all_keys(ZeroConfig)[dotted]

    def value(self, dotted: str) -> Any:
        """The value under a dotted key; raises `InputError` for one that does not exist."""
        self.setting(dotted)
        is_idle = dotted in keys_without_effect()
        return self.idle_values.get(dotted) if is_idle else attrgetter(dotted)(self)

    def to_dict(self) -> dict[str, Any]:
        """The JSON that gives these values: every key in the file or not at its default."""
        result: dict[str, Any] = dict(self.others)
        for dotted, entry in _value_keys().items():
            value = self.value(dotted)
            if dotted in self.file_keys or value != entry.default:
                *sections, name = dotted.split(".")
                inside = result
                for section in sections:
                    inside = inside.setdefault(section, {})
                inside[name] = entry.json_value(value)
        return result

    def resolve_batch(self, world_size: int) -> BatchSizes:
        """The sizes of a step, from the keys that are given.

        `world_size` counts data-parallel ranks. Any two of the three keys give the third, one of
        the two sizes alone means no accumulation. Raises `InputError` with the numbers.
        """
        train, micro = self.train_batch_size, self.train_micro_batch_size_per_gpu
        steps = self.gradient_accumulation_steps
        if train is None and micro is None:
            raise InputError("give train_batch_size or train_micro_batch_size_per_gpu")
        if train is None:
            return BatchSizes(micro * (steps or 1) * world_size, micro, steps or 1)
        if micro is None:
            micro = train // ((steps or 1) * world_size)
        if steps is None:
            steps = train // (micro * world_size) if micro else 0
        if train != micro * steps * world_size or not train:
            raise InputError(_batch_error(self, world_size))
        return BatchSizes(train, micro, steps)


def _value_keys() -> dict[str, Key]:
    keys = all_keys(ZeroConfig)
    return {dotted: entry for dotted, entry in keys.items() if entry.subsection is None}


def _batch_error(config: ZeroConfig, world_size: int) -> str:
    values = {name: config.value(name) for name in BATCH_KEYS[1:]}
    factors = {name: value for name, value in values.items() if value is not None}
    product = world_size * math.prod(factors.values())
    assignments = [f"{name} = {value}" for name, value in factors.items()]
    words = " x ".join([*assignments, f"{world_size} ranks"])
    relation = "exactly" if len(factors) == 2 else "a multiple of"
    return f"train_batch_size = {config.train_batch_size}: expected {relation} {product} ({words})"
