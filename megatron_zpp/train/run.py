"""The parts of a training run."""

from dataclasses import dataclass

from megatron_zpp.monitor.console import Console
from megatron_zpp.monitor.expected_step import StepWatch
from megatron_zpp.monitor.metrics import Metrics
from megatron_zpp.monitor.step_profiler import StepProfiler
from megatron_zpp.parallel.mesh import Ranks
from megatron_zpp.settings.config import Config
from megatron_zpp.tokenizer import Tokenizer
from megatron_zpp.train.garbage_collection import GarbageCollection
from megatron_zpp.train.inputs import Batches
from megatron_zpp.train.resume import Saver
from megatron_zpp.train.stop import Stopping
from megatron_zpp.train.trainer import Trainer


@dataclass(frozen=True, kw_only=True)
class Run:
    """A training run, built by `build_run`; training changes only the state of its members."""

    config: Config
    ranks: Ranks
    console: Console
    tokenizer: Tokenizer
    batches: Batches
    trainer: Trainer
    saver: Saver
    metrics: Metrics
    stopping: Stopping
    profiler: StepProfiler
    garbage: GarbageCollection
    step_watch: StepWatch | None = None  # with --plan-file
