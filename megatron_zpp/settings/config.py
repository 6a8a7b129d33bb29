"""The configuration of a run: frozen sections. Each part of the program gets its own.

A field has the name of Megatron's flag with underscores and declares that flag, so the parser is
generated from the sections. Values that follow from others are properties.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType

from megatron_zpp.settings.capability_flags import of_capabilities
from megatron_zpp.settings.data import BatchConfig, DataConfig, FimConfig, TokenizerConfig
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
from zeropp import ZeroConfig


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


NO_FLAGS = ("zero", "given")
# The sections whose fields are flags, by field of `Config`: those of capabilities come first.
SECTIONS: Mapping[str, type[Section]] = MappingProxyType(
    {each.name: each.default_factory for each in fields(Config) if each.name not in NO_FLAGS}
)
