"""The configuration of a run: frozen sections, each part of the program is given only its own.

A field is named as Megatron's flag with underscores and carries the description of that flag, so
the parser is generated from the sections. Values that follow from others are properties.
"""

from megatron_zpp.config.data import BatchConfig, DataConfig, TokenizerConfig
from megatron_zpp.config.model import ModelConfig
from megatron_zpp.config.optimization import (
    OptimizerConfig,
    PrecisionConfig,
    RecomputeConfig,
    ScheduleConfig,
)
from megatron_zpp.config.run import (
    CheckpointConfig,
    EvaluationConfig,
    LogConfig,
    ParallelConfig,
    TrainingConfig,
)

__all__ = [
    "BatchConfig",
    "CheckpointConfig",
    "DataConfig",
    "EvaluationConfig",
    "LogConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "PrecisionConfig",
    "RecomputeConfig",
    "ScheduleConfig",
    "TokenizerConfig",
    "TrainingConfig",
]
