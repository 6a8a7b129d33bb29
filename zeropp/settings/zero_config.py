"""`ZeroConfig`: the whole DeepSpeed JSON, read strictly and frozen.

Nothing is ignored silently: a key is honoured, or `notices` says why it has no effect, or
constructing the configuration raises `InputError`. What each key means is in
`zeropp.settings.sections`, how the text is read in `zeropp.settings.json_file`, and which keys
contradict each other in `zeropp.settings.rules`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from operator import attrgetter
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

from zeropp.errors import InputError
from zeropp.settings.json_file import OLD_NAMES, JsonValues, all_keys, build, read_json, unknown_key
from zeropp.settings.json_keys import JsonSection, Key, NoEffect, ignored, json_text, key
from zeropp.settings.rules import BATCH_KEYS, RULES
from zeropp.settings.sections import (
    ActivationCheckpointing,
    Bf16,
    Fp16,
    Optimizer,
    Scheduler,
    ZeroOptimization,
    Zeropp,
)

_FORMATS = MappingProxyType(  # torch's name of each
    {
        "fp32": "float32",
        "float32": "float32",
        "fp16": "float16",
        "float16": "float16",
        "bf16": "bfloat16",
        "bfp16": "bfloat16",
        "bfloat16": "bfloat16",
    }
)
_PRINTED = "the training script's own log settings decide what is printed and when"
_WRITTEN = "the training script writes what it wants to see; the engine has the numbers"
_SERVICE = "checkpoints are written where the training script says, by the ranks themselves"
_MONITOR = ("enabled", "output_path", "job_name")
_EXACT_MEAN = "gradients are averaged exactly, without an overflow on the way"
_FP32_MEAN = NoEffect("stage 0 averages whole gradients in fp32", when=lambda c: c.stage == 0)
_ANY_OPTIMIZER = "any torch optimizer may be used at any stage"
_SCHEDULE = "the learning-rate schedule is the training script's (--lr-decay-style and its like)"


def _off(why: str) -> Any:
    """An object that DeepSpeed switches on by `enabled`, for what is not here."""
    return ignored(None, why, not_enabled=f"{why}; set it to false, or leave the object out")


class Batch(NamedTuple):
    """Samples of a step on all ranks, samples of a micro-batch on one, micro-batches of a step."""

    samples: int
    micro_samples: int
    micro_batches: int


@dataclass(frozen=True, kw_only=True)
class ZeroConfig(JsonSection):
    """The top level of the JSON; `ZeroConfig()` is ZeRO stage 0 in fp32.

    `file_keys` are the dotted keys that a file gave a value; `auto_keys` are those it set to "auto"
    and that have not been given a value since; `old_names` are the outdated names it used. Raises
    `InputError` for values out of range and for values that contradict each other.
    """

    path: ClassVar[str] = ""

    train_batch_size: int | None = key(None, minimum=1, auto=True)  # samples
    train_micro_batch_size_per_gpu: int | None = key(None, minimum=1, auto=True)  # samples
    gradient_accumulation_steps: int | None = key(None, minimum=1, auto=True)
    gradient_clipping: float = key(0.0, minimum=0, auto=True)  # 0 means none
    communication_data_type: str | None = key(None, choices=tuple(_FORMATS), no_effect=_FP32_MEAN)
    zero_optimization: ZeroOptimization = key(ZeroOptimization())
    zeropp: Zeropp = key(Zeropp())
    fp16: Fp16 = key(Fp16())
    bf16: Bf16 = key(Bf16())
    optimizer: Optimizer = key(Optimizer())
    scheduler: Scheduler = ignored(Scheduler(), _SCHEDULE, in_engine="")
    activation_checkpointing: ActivationCheckpointing = key(ActivationCheckpointing())

    prescale_gradients: bool = ignored(False, _EXACT_MEAN)
    gradient_predivide_factor: float = ignored(1.0, _EXACT_MEAN)
    seq_parallel_communication_data_type: str | None = ignored(
        None, "no sequence is split over ranks"
    )
    sparse_gradients: bool = ignored(False, "embedding gradients are dense, and sharded like all")
    disable_allgather: bool = ignored(False, "weights are gathered block by block")
    zero_allow_untested_optimizer: bool = ignored(False, _ANY_OPTIMIZER)
    zero_force_ds_cpu_optimizer: bool = ignored(True, _ANY_OPTIMIZER)
    graph_harvesting: bool = ignored(False, "no CUDA graphs are captured")
    dataloader_drop_last: bool = ignored(False, "every rank always gets full batches")
    steps_per_print: int | None = ignored(
        None, "use --log-interval", minimum=1, infinity_is_null=True, in_engine=""
    )
    wall_clock_breakdown: bool = ignored(
        False, "use --log-timers-to-tensorboard", in_engine=_PRINTED
    )
    memory_breakdown: bool = ignored(False, _PRINTED)
    dump_state: bool = ignored(False, _PRINTED)
    tensorboard: Mapping | None = ignored(
        None, "use --tensorboard-dir", keys=_MONITOR, in_engine=_WRITTEN
    )
    wandb: Mapping | None = ignored(
        None,
        "use --wandb-project and its like",
        keys=("enabled", "group", "team", "project"),
        in_engine=_WRITTEN,
    )
    csv_monitor: Mapping | None = ignored(None, _PRINTED, keys=_MONITOR)
    flops_profiler: Mapping | None = ignored(
        None,
        "use --log-throughput",
        keys=("enabled", "recompute_fwd_factor", "profile_step", "module_depth", "top_modules")
        + ("detailed", "output_file"),
        in_engine="operations are not counted",
    )
    comms_logger: Mapping | None = ignored(
        None, _PRINTED, keys=("enabled", "verbose", "prof_all", "debug", "prof_ops")
    )
    checkpoint: Mapping | None = ignored(
        None,
        "checkpoints are always complete, and load at any number of ranks",
        keys=("tag_validation", "load_universal", "use_node_local_storage", "parallel_write")
        + ("writer",),
    )
    data_types: Mapping | None = ignored(
        None, "gradients are accumulated in fp32", keys=("grad_accum_dtype",)
    )
    aio: Mapping | None = ignored(
        None,
        "only NVMe offload reads it, and it is not available here",
        keys=("block_size", "queue_depth", "thread_count", "intra_op_parallelism")
        + ("single_submit", "overlap_events", "use_gds"),
    )
    curriculum_learning: Mapping | None = _off("there is no curriculum here")
    data_efficiency: Mapping | None = _off("there is neither a curriculum nor token dropping here")
    progressive_layer_drop: Mapping | None = _off("no layers are dropped here")
    compression_training: Mapping | None = _off("models are not compressed while they train here")
    eigenvalue: Mapping | None = _off("no eigenvalues are computed here")
    sparse_attention: Mapping | None = ignored(None, "the model decides what its attention is")
    amp: Mapping | None = _off("the sections bf16 and fp16 set the precision")
    torch_autocast: Mapping | None = _off("the sections bf16 and fp16 set the precision")
    elasticity: Mapping | None = _off(
        "the batch sizes do not follow from the ranks; a run may go on at any number of them"
    )
    autotuning: Mapping | None = ignored(None, "nothing is tuned before a run")
    nebula: Mapping | None = ignored(None, _SERVICE)
    hybrid_engine: Mapping | None = ignored(None, "one engine trains and evaluates")
    pipeline: Mapping | None = ignored(None, "the training script divides the model")
    comet: Mapping | None = ignored(None, _WRITTEN)
    timers: Mapping | None = ignored(None, _PRINTED)
    compile: Mapping | None = ignored(None, "the training script decides what is compiled")

    file_keys: frozenset[str] = frozenset()
    auto_keys: frozenset[str] = frozenset()
    old_names: tuple[str, ...] = ()
    source: str = field(default="configuration", compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        for rule in RULES:
            if rule.broken(self):
                values = [f"{name} = {json_text(self.value(name))}" for name in rule.keys]
                raise InputError(f"{' and '.join(values)}: {rule.why}")

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
        try:
            config = build(cls, {**filled, **file.values})
        except InputError as error:
            raise InputError(f"{file.source}: {error}") from None
        return replace(
            config,
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
    def offloads_optimizer(self) -> bool:
        """Whether fp32 weights, moments and the step are on the host."""
        return self.zero_optimization.offload_optimizer.device == "cpu"

    @property
    def offloads_weights(self) -> bool:
        """Whether the shards are on the host: in 16 bit where the optimizer is offloaded, too."""
        return self.zero_optimization.offload_param.device == "cpu" and self.stage == 3

    @property
    def reduces_once(self) -> bool:
        """Whether gradients are averaged once per step, whole ones accumulated until then."""
        return self.stage < 2 or self.zeropp.reduce_gradients_once

    @property
    def stores_frozen(self) -> bool:
        """Whether frozen weights are stored quantized (MixZ++)."""
        return self.zero_optimization.zero_quantized_nontrainable_weights

    @property
    def compute_format(self) -> str:
        """What forward and backward compute in, as torch calls it."""
        if self.fp16.enabled:
            return "float16"
        return "bfloat16" if self.bf16.enabled else "float32"

    @property
    def wire_format(self) -> str:
        """What unquantized collectives send, as torch calls it."""
        named = self.communication_data_type
        return self.compute_format if named is None else _FORMATS[named]

    @property
    def notices(self) -> tuple[str, ...]:
        """A line for each key in the file that has an old name or no effect here, and why."""
        return self.list_notices(in_engine=False)

    @property
    def unresolved_auto_keys(self) -> tuple[str, ...]:
        """Keys left to "auto" that `zeropp.initialize` needs; it can work out the batch sizes."""
        return tuple(
            dotted
            for dotted, entry in all_keys(ZeroConfig).items()
            if dotted in self.auto_keys
            and dotted not in BATCH_KEYS
            and not entry.why_no_effect(self, in_engine=True)
        )

    def list_notices(self, *, in_engine: bool) -> tuple[str, ...]:
        """The `notices`; `in_engine`: under `zeropp.initialize`, which honours the schedule."""
        lines = [
            f"{old} is an old name of {' and '.join(OLD_NAMES[old][0])}" for old in self.old_names
        ]
        ignored_sections: tuple[str, ...] = ()
        for dotted, entry in all_keys(ZeroConfig).items():
            if dotted.startswith(ignored_sections) or not self._in_file(dotted):
                continue
            reason = entry.why_no_effect(self, in_engine=in_engine)
            if reason:
                lines.append(f"{dotted} has no effect here: {reason}")
                ignored_sections += (f"{dotted}.",)
        return tuple(lines)

    def value(self, dotted: str) -> Any:
        """The value under a dotted key; raises `InputError` for one that does not exist."""
        if dotted not in all_keys(ZeroConfig):
            raise unknown_key(dotted, ZeroConfig)
        return attrgetter(dotted)(self)

    def to_dict(self) -> dict[str, Any]:
        """The JSON that gives these values: every key in the file or not at its default."""
        result: dict[str, Any] = {}
        for dotted, entry in _value_keys().items():
            value = self.value(dotted)
            if dotted in self.file_keys or value != entry.default:
                *sections, name = dotted.split(".")
                inside = result
                for section in sections:
                    inside = inside.setdefault(section, {})
                inside[name] = list(value) if isinstance(value, tuple) else value
        return result

    def resolve_batch(self, world_size: int) -> Batch:
        """The sizes of a step, from the keys that are given.

        `world_size` counts data-parallel ranks. Any two of the three keys give the third, one of
        the two sizes alone means no accumulation. Raises `InputError` with the numbers.
        """
        train, micro = self.train_batch_size, self.train_micro_batch_size_per_gpu
        steps = self.gradient_accumulation_steps
        if train is None and micro is None:
            raise InputError("give train_batch_size or train_micro_batch_size_per_gpu")
        if train is None:
            return Batch(micro * (steps or 1) * world_size, micro, steps or 1)
        if micro is None:
            micro = train // ((steps or 1) * world_size)
        if steps is None:
            steps = train // (micro * world_size) if micro else 0
        if train != micro * steps * world_size or not train:
            raise InputError(_batch_error(self, world_size))
        return Batch(train, micro, steps)

    def _in_file(self, dotted: str) -> bool:
        names = self.file_keys | self.auto_keys
        return dotted in names or any(name.startswith(f"{dotted}.") for name in names)


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
