"""`ZeroConfig`: the whole DeepSpeed JSON, read strictly and frozen.

Nothing is ignored in silence: a key is honoured, or `notices` says why it has no effect, or
constructing the configuration raises `InputError`. What each key means is in `config_sections`;
how the text is read is in `config_file`; which keys contradict each other is `RULES` below.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

from zeropp.errors import InputError
from zeropp.settings.json_file import RENAMED, all_keys, build, read_json, read_sections, unknown
from zeropp.settings.schema import Key, Section, idle, key, keys_of, shown
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
_BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
_MONITOR = ("enabled", "output_path", "job_name")
_EXACT_MEAN = "gradients are averaged exactly, without an overflow on the way"
_ANY_OPTIMIZER = "any torch optimizer may be used at any stage"
_SCHEDULE = "the learning-rate schedule is the training script's (--lr-decay-style and its like)"


@dataclass(frozen=True, kw_only=True)
class ZeroConfig(Section):
    """The top level of the JSON; `ZeroConfig()` is ZeRO stage 0 in fp32.

    `given` holds the dotted keys that a file gave a value, `auto` those it set to "auto" and that
    nobody has filled since. Raises `InputError` for values that cannot be or contradict each other.
    """

    path: ClassVar[str] = ""

    train_batch_size: int | None = key(None, minimum=1, auto=True)  # samples
    train_micro_batch_size_per_gpu: int | None = key(None, minimum=1, auto=True)  # samples
    gradient_accumulation_steps: int | None = key(None, minimum=1, auto=True)
    gradient_clipping: float = key(0.0, minimum=0, auto=True)  # 0 means none
    communication_data_type: str | None = key(None, choices=tuple(_FORMATS))
    zero_optimization: ZeroOptimization = key(ZeroOptimization())
    zeropp: Zeropp = key(Zeropp())
    fp16: Fp16 = key(Fp16())
    bf16: Bf16 = key(Bf16())
    optimizer: Optimizer = key(Optimizer())
    scheduler: Scheduler = idle(Scheduler(), _SCHEDULE, in_engine="")
    activation_checkpointing: ActivationCheckpointing = key(ActivationCheckpointing())

    prescale_gradients: bool = idle(False, _EXACT_MEAN)
    gradient_predivide_factor: float = idle(1.0, _EXACT_MEAN)
    seq_parallel_communication_data_type: str | None = idle(None, "no sequence is split over ranks")
    sparse_gradients: bool = idle(False, "embedding gradients are dense, and sharded like all")
    disable_allgather: bool = idle(False, "weights are gathered block by block")
    zero_allow_untested_optimizer: bool = idle(False, _ANY_OPTIMIZER)
    zero_force_ds_cpu_optimizer: bool = idle(True, _ANY_OPTIMIZER)
    graph_harvesting: bool = idle(False, "no CUDA graphs are captured")
    dataloader_drop_last: bool = idle(False, "every rank always gets full batches")
    steps_per_print: int | None = idle(None, "use --log-interval", minimum=1, in_engine="")
    wall_clock_breakdown: bool = idle(False, "use --timing-log-level", in_engine=_PRINTED)
    memory_breakdown: bool = idle(False, _PRINTED)
    dump_state: bool = idle(False, _PRINTED)
    tensorboard: Mapping | None = idle(
        None, "use --tensorboard-dir", keys=_MONITOR, in_engine=_WRITTEN
    )
    wandb: Mapping | None = idle(
        None,
        "use --wandb-project and its like",
        keys=("enabled", "group", "team", "project"),
        in_engine=_WRITTEN,
    )
    csv_monitor: Mapping | None = idle(None, _PRINTED, keys=_MONITOR)
    flops_profiler: Mapping | None = idle(
        None,
        "use --log-throughput",
        keys=("enabled", "recompute_fwd_factor", "profile_step", "module_depth", "top_modules")
        + ("detailed", "output_file"),
        in_engine="operations are not counted",
    )
    comms_logger: Mapping | None = idle(
        None, _PRINTED, keys=("enabled", "verbose", "prof_all", "debug", "prof_ops")
    )
    checkpoint: Mapping | None = idle(
        None,
        "checkpoints are always complete, and load at any number of ranks",
        keys=("tag_validation", "load_universal", "use_node_local_storage", "parallel_write")
        + ("writer",),
    )
    data_types: Mapping | None = idle(
        None, "gradients are accumulated in fp32", keys=("grad_accum_dtype",)
    )
    aio: Mapping | None = idle(
        None,
        "only NVMe offload reads it, and it is not available here",
        keys=("block_size", "queue_depth", "thread_count", "intra_op_parallelism")
        + ("single_submit", "overlap_events", "use_gds"),
    )

    given: frozenset[str] = frozenset()
    auto: frozenset[str] = frozenset()
    renamed: tuple[str, ...] = ()
    source: str = field(default="configuration", compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        for rule in RULES:
            if rule.broken(self):
                named = " and ".join(f"{one} = {shown(self.value(one))}" for one in rule.keys)
                raise InputError(f"{named}: {rule.why}")

    @classmethod
    def from_json(
        cls, source: Path | str | Mapping, defaults: Mapping[str, Any] = MappingProxyType({})
    ) -> "ZeroConfig":
        """The configuration in a file, a JSON text or a mapping.

        `defaults` (by dotted key, `None` to leave out) are the values, flags say, of keys that the
        source leaves out or sets to "auto". Raises `InputError` naming the place and what to do.
        """
        given, name = read_json(source)
        try:
            reading = read_sections(given, cls)
            here = frozenset(reading.values)
            filled = {k: v for k, v in defaults.items() if v is not None and k not in here}
            config = build(cls, {**_known(filled), **reading.values})
            return replace(
                config,
                given=here,
                auto=reading.auto - filled.keys(),
                renamed=reading.renamed,
                source=name,
            )
        except InputError as problem:
            raise InputError(f"{name}: {problem}") from None

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
        """Whether the 16-bit shards are on the host, too."""
        return self.zero_optimization.offload_param.device == "cpu"

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
        """One line for each given key that is an old name or has no effect here, and why."""
        return self._notices(in_engine=False)

    @property
    def notices_for_initialize(self) -> tuple[str, ...]:
        """The same under `zeropp.initialize`, which honours the schedule and needs no flags."""
        return self._notices(in_engine=True)

    @property
    def unfilled(self) -> tuple[str, ...]:
        """Keys left to "auto" that `zeropp.initialize` needs, but batch sizes it can work out."""
        auto = (one for one in all_keys(ZeroConfig) if one.dotted in self.auto)
        needed = (one.dotted for one in auto if not self._why_idle(one, in_engine=True))
        return tuple(one for one in needed if one not in _BATCH)

    def _notices(self, *, in_engine: bool) -> tuple[str, ...]:
        lines = [f"{old} is an old name of {' and '.join(RENAMED[old][0])}" for old in self.renamed]
        silenced: tuple[str, ...] = ()
        for one in all_keys(ZeroConfig):
            if not one.dotted.startswith(silenced or "\0") and self._was_given(one):
                reason = self._why_idle(one, in_engine=in_engine)
                if reason:
                    lines.append(f"{one.dotted} has no effect here: {reason}")
                    silenced += (f"{one.dotted}.",)
        return tuple(lines)

    def value(self, dotted: str) -> Any:
        """The value under a dotted key; raises `InputError` for one that does not exist."""
        found: Any = self
        for name in dotted.split("."):
            if not isinstance(found, Section) or name not in {o.name for o in keys_of(type(found))}:
                raise unknown(dotted, ZeroConfig)
            found = getattr(found, name)
        return found

    def with_values(self, values: Mapping[str, Any]) -> "ZeroConfig":
        """A copy with other values, by dotted key; `given` stays what the file gave."""
        merged = {**self._leaves(), **_known(values)}
        kept = {one: getattr(self, one) for one in ("given", "renamed", "source")}
        return replace(build(ZeroConfig, merged), auto=self.auto - values.keys(), **kept)

    def to_dict(self) -> dict[str, Any]:
        """The JSON that gives these values: every key that was given or is not at its default."""
        result: dict[str, Any] = {}
        for one in _leaf_keys():
            value = self.value(one.dotted)
            if one.dotted in self.given or value != one.default:
                *sections, name = one.dotted.split(".")
                inside = result
                for section in sections:
                    inside = inside.setdefault(section, {})
                inside[name] = list(value) if isinstance(value, tuple) else value
        return result

    def resolve_batch(self, world_size: int) -> tuple[int, int, int]:
        """(samples per step, samples per rank and micro-batch, micro-batches per step).

        `world_size` counts data-parallel ranks. Any two of the three keys give the third, one of
        the two sizes alone means no accumulation. Raises `InputError` with the numbers.
        """
        train, micro = self.train_batch_size, self.train_micro_batch_size_per_gpu
        steps = self.gradient_accumulation_steps
        if train is None and micro is None:
            raise InputError("give train_batch_size or train_micro_batch_size_per_gpu")
        if train is None:
            return micro * (steps or 1) * world_size, micro, steps or 1
        if micro is None:
            micro = train // ((steps or 1) * world_size)
        if steps is None:
            steps = train // (micro * world_size) if micro else 0
        if train != micro * steps * world_size or not train:
            raise InputError(_batch_error(self, world_size))
        return train, micro, steps

    def _was_given(self, one: Key) -> bool:
        inside = f"{one.dotted}."
        named = self.given | self.auto
        return one.dotted in named or any(other.startswith(inside) for other in named)

    def _why_idle(self, one: Key, *, in_engine: bool) -> str:
        if in_engine and one.facts.in_engine is not None:
            return one.facts.in_engine
        if one.facts.idle:
            return one.facts.idle
        if one.dotted == "communication_data_type" and self.stage == 0:
            return "stage 0 averages whole gradients in fp32"
        needs = one.facts.needs
        if needs and self.value(needs) in (False, "none"):
            return f"it needs {needs}"
        return ""

    def _leaves(self) -> dict[str, Any]:
        return {one.dotted: self.value(one.dotted) for one in _leaf_keys()}


@dataclass(frozen=True, kw_only=True)
class Rule:
    """Keys whose values cannot stand together, when, and why."""

    keys: tuple[str, ...]
    broken: Callable[[ZeroConfig], bool]
    why: str


_STAGE = "zero_optimization.stage"
_ZERO = "zero_optimization."
RULES = (
    Rule(
        keys=("fp16.enabled", "bf16.enabled"),
        broken=lambda c: c.fp16.enabled and c.bf16.enabled,
        why="only one of them can be true",
    ),
    Rule(
        keys=(_ZERO + "zero_hpz_partition_size", _STAGE),
        broken=lambda c: c.zero_optimization.zero_hpz_partition_size > 1 and c.stage != 3,
        why="hpZ keeps a second copy of gathered weights, so it needs stage 3",
    ),
    Rule(
        keys=(_ZERO + "zero_quantized_weights", _STAGE),
        broken=lambda c: c.zero_optimization.zero_quantized_weights and c.stage == 0,
        why="stage 0 gathers no weights to quantize; it needs stage 1, 2 or 3",
    ),
    Rule(
        keys=(_ZERO + "zero_quantized_gradients", _STAGE),
        broken=lambda c: c.zero_optimization.zero_quantized_gradients and c.stage == 0,
        why="stage 0 shards no gradients to quantize; it needs stage 1, 2 or 3",
    ),
    Rule(
        keys=(_ZERO + "zero_quantized_nontrainable_weights", _STAGE),
        broken=lambda c: c.zero_optimization.zero_quantized_nontrainable_weights and c.stage == 0,
        why="stage 0 shards no weights; it needs stage 1, 2 or 3",
    ),
    Rule(
        keys=(_ZERO + "offload_optimizer.device", _STAGE),
        broken=lambda c: c.zero_optimization.offload_optimizer.device != "none" and c.stage == 0,
        why="offload moves a rank's shard to the CPU; stage 0 has none, stages 1, 2 and 3 have",
    ),
    Rule(
        keys=(_ZERO + "offload_param.device", _STAGE),
        broken=lambda c: c.zero_optimization.offload_param.device != "none" and c.stage != 3,
        why="only stage 3 shards the weights that would be moved to the CPU",
    ),
    Rule(
        keys=(_ZERO + "offload_param.device", _ZERO + "offload_optimizer.device"),
        broken=lambda c: c.offloads_weights and not c.offloads_optimizer,
        why="weights on the CPU are updated there: it needs the optimizer on the CPU too",
    ),
    Rule(
        keys=(_ZERO + "offload_param.device", _ZERO + "offload_optimizer.ratio"),
        broken=lambda c: c.offloads_weights and c.zero_optimization.offload_optimizer.ratio < 1,
        why="a part of the optimizer on the device needs its weights there",
    ),
    Rule(
        keys=(_ZERO + "zero_quantized_nontrainable_weights", _ZERO + "offload_param.device"),
        broken=lambda c: c.stores_frozen and c.offloads_weights,
        why="frozen weights that are stored quantized stay on the device",
    ),
    Rule(
        keys=("zeropp.delayed_param_update", _ZERO + "offload_optimizer.device"),
        broken=lambda c: c.zeropp.delayed_param_update and not c.offloads_optimizer,
        why="the update that runs beside the next step is the CPU's; it needs the optimizer there",
    ),
    Rule(
        keys=_BATCH,
        broken=lambda c: (
            (c.train_batch_size or 0)
            % ((c.train_micro_batch_size_per_gpu or 1) * (c.gradient_accumulation_steps or 1))
            != 0
        ),
        why="the first must be the product of the other two and the number of ranks",
    ),
)


def _leaf_keys() -> list[Key]:
    return [one for one in all_keys(ZeroConfig) if one.section is None]


def _known(values: Mapping[str, Any]) -> Mapping[str, Any]:
    leaves = {one.dotted for one in _leaf_keys()}
    for dotted in values.keys() - leaves:
        raise unknown(dotted, ZeroConfig)
    return values


def _batch_error(config: ZeroConfig, world_size: int) -> str:
    parts = [f"train_batch_size = {config.train_batch_size}: expected"]
    known = []
    for name in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps"):
        if config.value(name) is not None:
            known.append((config.value(name), f"{name} = {config.value(name)}"))
    product = world_size
    for number, _ in known:
        product *= number
    words = " x ".join([words for _, words in known] + [f"{world_size} ranks"])
    exactly = "exactly" if len(known) == 2 else "a multiple of"
    return " ".join([*parts, exactly, f"{product} ({words})"])
