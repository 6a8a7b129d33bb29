"""Defaults that depend on other settings, and those of a run without any flags: a small GPT.

Each function takes the values of the flags that were set and returns those to add, so that a
configuration built from all of them is complete.
"""

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from megatron_zpp.settings.config import SECTIONS, BatchConfig, ModelConfig
from zeropp.errors import InputError
from zeropp.settings.schema import settings_of

ITERATIONS = 100
# With the default length, so that a short run prints something.
SHORT_RUN = MappingProxyType({"train_iters": ITERATIONS, "log_interval": 10, "eval_iters": 10})
LENGTHS = ("train_iters", "train_samples", "train_tokens")
SOURCES = ("data_path", "train_data_path", "valid_data_path", "test_data_path", "mock_data")
SHAPE = ("num_layers", "hidden_size", "num_attention_heads", "seq_length", "lr")
DEFAULTS = MappingProxyType(
    {flag.name: flag.default for section in SECTIONS.values() for flag in settings_of(section)}
)


def complete(
    values: Mapping[str, Any], accumulation: int | None, world_size: int
) -> dict[str, Any]:
    """Return `values`, completed with a default for every field of `Config`.

    `accumulation` is the number of micro-batches in the JSON. Raises InputError for values that
    cannot be completed.
    """
    run_length = {} if any(name in values for name in LENGTHS) else SHORT_RUN
    result = {**DEFAULTS, **run_length, **values}
    if result["max_position_embeddings"] is None:
        result["max_position_embeddings"] = result["seq_length"]
    result["zero_stage"] = _stage(values)
    result |= _attention(values) | _recomputation(values)
    return result | _batch(values, accumulation, world_size)


def describe(values: Mapping[str, Any], completed: Mapping[str, Any]) -> str:
    """One line of the main defaults in `completed` that are not in `values`; may be empty."""
    shape = ("seq_length", "lr") if "pretrained_checkpoint" in values else SHAPE
    run_length = () if any(name in values for name in LENGTHS) else SHORT_RUN
    names = [*shape, "micro_batch_size", "global_batch_size", *run_length]
    defaults = [
        f"--{name.replace('_', '-')} {completed[name]}"
        for name in names
        if name not in values and completed.get(name) is not None
    ]
    if not any(name in values for name in SOURCES):
        defaults.append("the Python standard library's text as data")
    return f"not given, so by default: {', '.join(defaults)}" if defaults else ""


def _stage(values: Mapping[str, Any]) -> int:
    if "zero_stage" in values:
        return values["zero_stage"]
    return 1 if values.get("use_distributed_optimizer") else 0


def _attention(values: Mapping[str, Any]) -> dict[str, Any]:
    positions = values.get("position_embedding_type", ModelConfig().position_embedding_type)
    if values.get("no_position_embedding") and positions == "learned_absolute":
        raise InputError(
            "--no-position-embedding needs --position-embedding-type rope or none: "
            "choose what replaces the learned positions"
        )
    if values.get("group_query_attention") and "num_query_groups" not in values:
        return {"num_query_groups": 1}
    return {}


def _recomputation(values: Mapping[str, Any]) -> dict[str, Any]:
    is_full = values.get("recompute_granularity") == "full"
    return {"recompute_method": "uniform"} if is_full and "recompute_method" not in values else {}


def _batch(
    values: Mapping[str, Any], accumulation: int | None, world_size: int
) -> dict[str, int | None]:
    """The micro-batch and global batch size, each from the other where only one is given."""
    micro, total = values.get("micro_batch_size"), values.get("global_batch_size")
    ramp = values.get("rampup_batch_size")
    schedule = BatchConfig(step_batch_size_schedule=values.get("step_batch_size_schedule"))
    scheduled = [size for _, size in schedule.batch_sizes]
    if total is None and scheduled:
        total = max(scheduled)
    ranks = world_size * (accumulation or 1)
    if micro is None:
        micro = BatchConfig().micro_batch_size
        if total is not None:
            sizes = (total, *ramp[:2]) if ramp and not accumulation else (total, *scheduled)
            micro = _micro_batch(math.gcd(*sizes), ranks, accumulation)
    if total is None and ramp is None:
        total = micro * ranks
    return {"micro_batch_size": micro, "global_batch_size": total}


def _micro_batch(total: int, ranks: int, accumulation: int | None) -> int:
    """All of a rank's share if the accumulation is given, else a divisor up to the default."""
    share, remainder = divmod(total, ranks)
    if remainder:
        return BatchConfig().micro_batch_size  # the check of the batch sizes reports it
    limit = share if accumulation else BatchConfig().micro_batch_size
    return max(size for size in range(1, limit + 1) if share % size == 0)
