"""Defaults that depend on other settings, and those of a run without any flags: a small GPT.

Each function takes the values of the flags that were set and returns those to add, so that a
configuration built from all of them is complete.
"""

import math
from collections.abc import Mapping
from itertools import chain
from types import MappingProxyType
from typing import Any

from megatron_zpp.settings.capability_flags import CAPABILITIES
from megatron_zpp.settings.config import SECTIONS, BatchConfig, ModelConfig
from megatron_zpp.settings.data import SOURCES
from megatron_zpp.settings.json_flags import STRATEGIES
from zeropp.errors import InputError
from zeropp.settings import declared, settings_of

ITERATIONS = 100
# With the default length, so that a short run prints something.
SHORT_RUN = MappingProxyType({"train_iters": ITERATIONS, "log_interval": 10, "eval_iters": 10})
LENGTHS = ("train_iters", "train_samples", "train_tokens")
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
    for change in declared("BEFORE_DEFAULTS", CAPABILITIES):
        values = change(values)
    run_length = {} if any(name in values for name in LENGTHS) else SHORT_RUN
    result = {**DEFAULTS, **run_length, **values}
    if result["max_position_embeddings"] is None:
        result["max_position_embeddings"] = result["seq_length"]
    result["zero_stage"] = _stage(values)
    if values.get("recompute_granularity") == "full" and "recompute_method" not in values:
        result["recompute_method"] = "uniform"
    result |= _model(values)
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
    if not any(name in values for name in ("mock_data", *chain.from_iterable(SOURCES))):
        defaults.append("the Python standard library's text as data")
    return f"not given, so by default: {', '.join(defaults)}" if defaults else ""


def _stage(values: Mapping[str, Any]) -> int:
    """The ZeRO stage: its own, or that of Megatron's flags for FSDP, which must agree."""
    stages = _fsdp_stages(values)
    if "zero_stage" in values:
        stages["--zero-stage"] = values["zero_stage"]
    if len(set(stages.values())) > 1:
        words = " and ".join(f"{name} is ZeRO stage {stage}" for name, stage in stages.items())
        raise InputError(f"{words} (flag or JSON): keep one of them")
    at_least = 1 if values.get("use_distributed_optimizer") else 0
    return next(iter(stages.values()), at_least)


def _fsdp_stages(values: Mapping[str, Any]) -> dict[str, int]:
    """The ZeRO stage that each of Megatron's flags for FSDP stands for, by the flag."""
    stages = {}
    if values.get("use_torch_fsdp2"):
        keeps = values.get("torch_fsdp2_no_reshard_after_forward")
        stages["--use-torch-fsdp2"] = 2 if keeps else 3
    elif values.get("torch_fsdp2_no_reshard_after_forward"):
        raise InputError("--torch-fsdp2-no-reshard-after-forward needs --use-torch-fsdp2")
    strategy = values.get("data_parallel_sharding_strategy")
    if strategy is not None:
        stages[f"--data-parallel-sharding-strategy {strategy}"] = STRATEGIES[strategy]
    elif values.get("use_megatron_fsdp"):
        stages["--use-megatron-fsdp"] = STRATEGIES["optim_grads_params"]
    return stages


def _model(values: Mapping[str, Any]) -> dict[str, Any]:
    """What flags of attention, MLP and vocabulary say of the settings of others."""
    added = _gated_mlp(values) if values.get("glu_activation") else {}
    if rows := values.get("pad_vocab_size_to"):
        multiple = values.get("make_vocab_size_divisible_by", 1)
        added["make_vocab_size_divisible_by"] = multiple if rows % multiple else rows
    if values.get("multi_latent_attention"):
        implied = {"position_embedding_type": "rope"}
        if values.get("rotary_scaling_factor", 1) > 1:
            implied["rope_type"] = "yarn"
        added |= {name: value for name, value in implied.items() if name not in values}
    default = added.get("position_embedding_type", ModelConfig().position_embedding_type)
    positions = values.get("position_embedding_type", default)
    if values.get("no_position_embedding") and positions == "learned_absolute":
        raise InputError(
            "--no-position-embedding needs --position-embedding-type rope or none: "
            "choose what replaces the learned positions"
        )
    kind, groups = values.get("attention_head_type"), values.get("num_query_groups")
    if kind == "multiquery" and groups not in (None, 1):
        raise InputError(
            f"--attention-head-type multiquery and --num-query-groups {groups} contradict: keep one"
        )
    if kind == "multihead" and (groups is not None or values.get("group_query_attention")):
        other = f"--num-query-groups {groups}" if groups else "--group-query-attention"
        raise InputError(f"--attention-head-type multihead and {other} contradict: keep one")
    if groups is None and (kind == "multiquery" or values.get("group_query_attention")):
        added["num_query_groups"] = 1
    return added


def _gated_mlp(values: Mapping[str, Any]) -> dict[str, Any]:
    """What --glu-activation means in BigScience's program: erf in GELU, and as wide without."""
    width = 4 * values.get("hidden_size", ModelConfig().hidden_size)
    return {
        values["glu_activation"]: True,
        "bias_gelu_fusion": False,
        "ffn_hidden_size": values.get("ffn_hidden_size", width),
    }


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
