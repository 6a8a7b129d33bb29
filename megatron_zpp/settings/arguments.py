"""Flags and JSON to `Config`: read, merge, complete, check, and log what has no effect.

A value given in only one place, command line or file, is used; a key set to "auto" gives none.
Where DeepSpeed's engine would take the file's value whatever the flag says, so is it here. Settings
that nobody gave get a default, which may depend on others; without any flags it is a small GPT.
Whatever is wrong raises an InputError that names the flag or key, its value, and what to do.
"""

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from types import MappingProxyType
from typing import Any

from megatron_zpp.settings.capability_flags import CAPABILITIES
from megatron_zpp.settings.command_line import HELP, TypedFlag, read, vocabulary
from megatron_zpp.settings.config import (
    SECTIONS,
    BatchConfig,
    Config,
    ModelConfig,
    ParallelConfig,
)
from megatron_zpp.settings.data import SOURCES
from megatron_zpp.settings.flag import Flag, Section
from megatron_zpp.settings.flags_without_effect import flags_without_effect
from megatron_zpp.settings.gpt.model import ModelFlags
from megatron_zpp.settings.json_flags import STRATEGIES, ZeroFlags
from megatron_zpp.settings.run_help import run_help
from zeropp import ZeroConfig
from zeropp.errors import InputError
from zeropp.settings import JsonValues, declared, read_json, settings_of

FLAG_SECTIONS = (*SECTIONS.values(), ZeroFlags, ModelFlags)
FLAGS = (*chain.from_iterable(map(settings_of, FLAG_SECTIONS)), *flags_without_effect())
VOCABULARY = vocabulary(FLAG_SECTIONS, flags_without_effect())
ITERATIONS = 100
# With the default length, so that a short run prints something.
SHORT_RUN = MappingProxyType({"train_iters": ITERATIONS, "log_interval": 10, "eval_iters": 10})
LENGTHS = ("train_iters", "train_samples", "train_tokens")
SHAPE = ("num_layers", "hidden_size", "num_attention_heads", "seq_length", "lr")
DEFAULTS = MappingProxyType(
    {flag.name: flag.default for section in SECTIONS.values() for flag in settings_of(section)}
)
_STAGE = "zero_optimization.stage"
_ACCUMULATION = "gradient_accumulation_steps"

log = logging.getLogger("megatron_zpp")


def parse(argv: Sequence[str], world_size: int, program: str = "pretrain_gpt.py") -> Config:
    """The configuration that `argv` (without the program's name) asks for on `world_size` ranks,
    or on as many as --dry-run-ranks or --rehearse-ranks says.

    Logs which settings have a default or no effect. Raises InputError for mistakes of the user,
    and SystemExit(0) after printing the help of `program`.
    """
    if any(word in HELP for word in argv):
        print(run_help(argv, program))
        raise SystemExit(0)
    typed = read(argv, VOCABULARY)
    for name in typed.keys() & {"dry_run_ranks", "rehearse_ranks"}:
        world_size = typed[name].value
    file = JsonValues()
    if "deepspeed_config" in typed:
        file = read_json(typed["deepspeed_config"].value, ZeroConfig)
    values = merge(typed, file, FLAGS)
    accumulation = file.values.get(_ACCUMULATION)
    parallel = _section(ParallelConfig, {**DEFAULTS, **values})
    parallel.check()
    num_replicas = parallel.data_parallel_size(world_size)
    alone = file.values.get("zeropp.sync_every", 1) != 1
    if alone and file.values.get("zeropp.sync_store"):  # each node is a launch of its own
        num_replicas *= file.values.get("zeropp.sync_nodes") or 1
    completed = complete(values, accumulation, num_replicas)
    given = {name: assignment.text for name, assignment in typed.items()}
    sections = {name: _section(kind, completed) for name, kind in SECTIONS.items()}
    config = Config(**sections, given=given)
    config.check(num_replicas)
    _check_accumulation(config.batch, file, num_replicas)
    config = replace(config, zero=_zero(file, completed, config.batch, num_replicas))
    config.require_none_of("OBSTACLES")
    for line in config.notices(typed.values()):
        log.info("%s", line)
    default_line = describe_defaults(values, completed)
    if default_line:
        log.info("%s", default_line)
    return config.rehearsed() if config.training.rehearse_ranks else config


def require_pretrained(pretrained: str | None, program: str) -> None:
    """Raise InputError for a run that names no pretrained model to fine-tune."""
    if pretrained is None:
        raise InputError(
            f"{program} needs --pretrained-checkpoint FOLDER, the model to fine-tune: a folder of "
            "checkpoints (tools/convert_hf.py makes one of a Hugging Face model); pretrain_gpt.py "
            "trains from scratch"
        )


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


def describe_defaults(values: Mapping[str, Any], completed: Mapping[str, Any]) -> str:
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


def _section(kind: type[Section], values: Mapping[str, Any]) -> Section:
    return kind(**{flag.name: values[flag.name] for flag in settings_of(kind)})


def _check_accumulation(batch: BatchConfig, file: JsonValues, world_size: int) -> None:
    if file.values.get(_ACCUMULATION) is None:
        return
    steps = batch.global_batch_size // (batch.micro_batch_size * world_size)
    if steps != file.values[_ACCUMULATION]:
        raise InputError(
            f"{file.assignment(_ACCUMULATION)} contradicts global batch size "
            f"{batch.global_batch_size} / (micro-batch size {batch.micro_batch_size} x "
            f"{world_size} data-parallel ranks) = {steps}: change one of them"
        )


def _zero(
    file: JsonValues, completed: Mapping[str, Any], batch: BatchConfig, world_size: int
) -> ZeroConfig:
    """The JSON's settings; what the file leaves open is filled in from the flags."""
    from_flags = json_values(completed, FLAGS)
    if batch.rampup_batch_size is None and not batch.batch_sizes:
        per_micro_batch = batch.micro_batch_size * world_size
        from_flags[_ACCUMULATION] = batch.global_batch_size // per_micro_batch
    return ZeroConfig.from_values(file, from_flags)
