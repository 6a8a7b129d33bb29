"""The configuration of a run: frozen sections. Each part of the program gets its own.

A field has the name of Megatron's flag with underscores and declares that flag, so the parser is
generated from the sections. Values that follow from others are properties.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from math import inf
from pathlib import Path
from types import MappingProxyType
from typing import Any

from megatron_zpp.settings.capability_flags import CAPABILITIES, of_capabilities
from megatron_zpp.settings.command_line import TypedFlag
from megatron_zpp.settings.data import (
    SOURCES,
    BatchConfig,
    DataConfig,
    FimConfig,
    TokenizerConfig,
)
from megatron_zpp.settings.flag import Section
from megatron_zpp.settings.gpt.model import ModelConfig
from megatron_zpp.settings.optimization import (
    OptimizerConfig,
    PrecisionConfig,
    RecomputeConfig,
    ScheduleConfig,
)
from megatron_zpp.settings.parallel import ParallelConfig
from megatron_zpp.settings.run import (
    CheckpointConfig,
    EvaluationConfig,
    LogConfig,
    TrainingConfig,
)
from megatron_zpp.settings.scheduled_values import Schedules
from zeropp import ZeroConfig
from zeropp.errors import InputError
from zeropp.settings import all_keys, declared, read_toml, settings_of

OWN = ("logging_level", "num_workers", "tensorboard_queue_size")  # each machine may have its own
OWN_KEYS = ("zeropp.sync_store",)  # a host may have other names elsewhere
PATHS = (  # which may differ between machines, but are given to all or to none
    *(name for names in SOURCES for name in names),
    *("data_cache_path", "vocab_file", "merge_file", "tokenizer_model", "pretrained_checkpoint"),
    *("save", "load", "plan_file", "tensorboard_dir", "wandb_save_dir"),
)
REASONS = MappingProxyType(read_toml(__package__, "json_no_effect.toml"))  # by key of the JSON


@dataclass(frozen=True, kw_only=True)
class Config(of_capabilities()):
    """All settings of a run; `arguments.parse` builds a consistent one.

    `given`: the flags that were typed, with their values, by setting.
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    fim: FimConfig = field(default_factory=FimConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    zero: ZeroConfig = field(default_factory=ZeroConfig)
    recompute: RecomputeConfig = field(default_factory=RecomputeConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)
    given: Mapping[str, str] = field(default_factory=dict, compare=False)

    @property
    def schedules(self) -> Schedules:
        """What depends on the samples consumed; raises InputError as `Schedules.of` does."""
        return Schedules.of(
            self.batch, self.model.seq_length, self.training, self.schedule, self.optimizer
        )

    @property
    def sample_sizes(self) -> tuple[int, int, int]:
        """How many training, validation and test samples a run asks for, as in Megatron."""
        length, evaluation = self.schedules.length, self.evaluation
        num_test = evaluation.eval_iters * self.batch.global_batch_size
        rounds = length.iterations // evaluation.eval_interval + 1 + evaluation.eval_at_start
        return length.samples, rounds * num_test, num_test

    def to_dict(self) -> dict[str, Any]:
        """Return all settings by section, as plain values that JSON can hold."""
        sections = {name: asdict(getattr(self, name)) for name in SECTIONS}
        return {"zero": self.zero.to_dict(), **sections}

    def changes(
        self, saved: Mapping[str, Any], of_sections: Iterable[tuple[str, Sequence[str]]]
    ) -> list[str]:
        """Describe the named settings of sections that differ from those in a checkpoint."""
        current = json.loads(json.dumps(self.to_dict()))  # tuples are lists, as in the checkpoint
        return [
            f"{name} is {current[section][name]} now, {saved[section][name]} in the checkpoint"
            for section, names in of_sections
            for name in names
            if name in saved.get(section, {}) and current[section][name] != saved[section][name]
        ]

    def step_key(self, num_ranks: int) -> dict[str, Any]:
        """Return what a step's time depends on in the settings of a run, as JSON holds it.

        Of ranks, `self` says what capabilities have settled (`recipe.capability.settled`).
        """
        model, zero = self.model, self.zero
        optimization, own = zero.zero_optimization, zero.zeropp
        parallel = self.parallel
        tensor, context = parallel.tensor_model_parallel_size, parallel.context_parallel_size
        is_full = self.recompute.recompute_granularity == "full"
        key = {
            "tensor": tensor,
            "sequence_parallel": tensor > 1 and parallel.sequence_parallel,
            "context": context,
            "context_by": parallel.cp_comm_type if context > 1 else None,
            "pipeline": parallel.pipeline_model_parallel_size,
            "stages": [len(stage) for stage in parallel.stages(model.num_layers)],
            "ranks": num_ranks,
            "layers": model.num_layers,
            "hidden": model.hidden_size,
            "ffn": model.ffn_size,
            "heads": [model.num_attention_heads, model.kv_heads, model.head_dim],
            "tokens": model.seq_length,
            "format": zero.compute_format,
            "global_batch": self.batch.global_batch_size,
            "micro_batch": self.batch.micro_batch_size,
            "recompute": self.recompute.recompute_granularity,
            "recompute_layers": self.recompute.recompute_num_layers if is_full else None,
            "stage": zero.stage,
            "qwz": own.weight_bits if optimization.zero_quantized_weights else None,
            "hpz": optimization.zero_hpz_partition_size,
            "qgz": list(own.gradient_bits) if optimization.zero_quantized_gradients else None,
            "steps": zero.updates_copies,
            "coded": own.code_messages,
            "once": zero.reduces_once,
        }
        for each in declared("STEP_KEYS", CAPABILITIES):
            key |= each(self)
        return key

    def shared(self) -> dict[str, str]:
        """Return the settings that all ranks must have alike, as texts by the names of users.

        Each rank reads its own command line and its own JSON. Some differences would train another
        model without an error: each rank would apply its own learning rate to its shards. Others
        would leave ranks waiting for each other.
        """
        texts = {}
        for section, kind in SECTIONS.items():
            for entry in settings_of(kind):
                value = getattr(getattr(self, section), entry.name)
                if not entry.why_ignored and entry.name not in OWN:
                    shown = "given" if entry.name in PATHS else str(value)
                    texts[entry.shown] = "not given" if value is None else shown
        for dotted, key in all_keys(ZeroConfig).items():
            if key.subsection is None and not key.why_ignored and dotted not in OWN_KEYS:
                texts[f'"{dotted}"'] = str(self.zero.value(dotted))
        return texts

    def check(self, num_replicas: int) -> None:
        """Raise InputError for values out of range and for values that do not fit each other."""
        for name in SECTIONS:
            getattr(self, name).check()
        layers, limit = self.recompute.recompute_num_layers, self.model.num_layers
        if self.recompute.recompute_granularity == "full" and layers > limit:
            raise InputError(f"--recompute-num-layers {layers} is more than --num-layers {limit}")
        if self.checkpoint.no_load_lr_state and self.schedule.use_checkpoint_opt_param_scheduler:
            raise InputError(
                "--no-load-lr-state and --use-checkpoint-opt_param-scheduler contradict: leave one "
                "out"
            )
        self.schedules.batch_size.check(num_replicas)
        save, pretrained = self.checkpoint.save, self.pretrained_checkpoint
        if save and pretrained and Path(save).resolve() == Path(pretrained).resolve():
            raise InputError(
                f"--save {save} is the folder of --pretrained-checkpoint, where a newer checkpoint "
                "would replace the pretrained one: save to another folder"
            )
        is_elsewhere = self.checkpoint.use_checkpoint_args or pretrained
        if not is_elsewhere:
            self.require_divisible(num_replicas)

    def require_divisible(self, num_replicas: int) -> None:
        """Raise InputError for sizes of the model that its ranks cannot share out.

        The program calls it again once it knows a model that the flags only name.
        """
        size = self.parallel.pipeline_model_parallel_size
        if len(self.parallel.stages(self.model.num_layers)) > size:
            self.schedules.batch_size.check(num_replicas, multiple=size)
        self.parallel.require_divides(self.model)

    def rehearsed(self) -> "Config":
        """Return the same for `--rehearse-ranks`: with planned peers, and no files."""
        size = min(self.zero.zeropp.ranks_per_node or inf, self.training.rehearse_ranks)
        return replace(
            self,
            zero=replace(self.zero, zeropp=replace(self.zero.zeropp, ranks_per_node=size)),
            parallel=replace(self.parallel, distributed_backend="fake"),
            checkpoint=CheckpointConfig(),
            log=LogConfig(),
        )

    def require_none_of(self, obstacles: str) -> None:
        """Raise InputError for what capabilities declare under this name, if it is the case."""
        for obstacle, is_met in declared(obstacles, CAPABILITIES):
            if is_met(self):
                raise InputError(obstacle.format(config=self))

    def notices(self, typed: Iterable[TypedFlag]) -> Iterator[str]:
        """Yield lines on flags and keys that have no effect, or another one than may be thought."""
        ignored = {each.text: why for each in typed if (why := each.flag.why_no_effect(self))}
        model, training = self.model, self.training
        if model.has_gelu and not model.bias_gelu_fusion:
            by_glu = model.geglu and "glu_activation" in self.given
            name = "--glu-activation geglu" if by_glu else "--no-bias-gelu-fusion"
            yield f"{name}: the exact (erf) GELU is used instead of its tanh form"
        if training.train_tokens and (training.train_iters or training.train_samples):
            yield (
                "--train-tokens and another length: the first to be reached ends the run, "
                f"after {self.schedules.length.iterations} iterations"
            )
        yield from self.zero.notices(REASONS, ignored)


NO_FLAGS = ("zero", "given")
# The sections whose fields are flags, by field of `Config`: those of capabilities come first.
SECTIONS: Mapping[str, type[Section]] = MappingProxyType(
    {each.name: each.default_factory for each in fields(Config) if each.name not in NO_FLAGS}
)
