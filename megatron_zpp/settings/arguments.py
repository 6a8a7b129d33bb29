"""Flags and JSON to `Config`: read, merge, complete, check, and log what has no effect.

Whatever is wrong raises an InputError that names the flag or key, its value, and what to do.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any

from megatron_zpp.settings import defaults
from megatron_zpp.settings.capability_flags import CAPABILITIES
from megatron_zpp.settings.command_line import HELP, TypedFlag, read, vocabulary
from megatron_zpp.settings.config import SECTIONS, BatchConfig, Config, ModelConfig, ParallelConfig
from megatron_zpp.settings.flag import Section
from megatron_zpp.settings.flags_without_effect import flags_without_effect
from megatron_zpp.settings.gpt.model import ModelFlags
from megatron_zpp.settings.json_flags import ZeroFlags, json_values, merge
from megatron_zpp.settings.run_help import run_help
from megatron_zpp.settings.scheduled_values import Schedules
from zeropp import ZeroConfig
from zeropp.errors import InputError
from zeropp.settings import JsonValues, declared, read_json, read_toml, settings_of

FLAG_SECTIONS = (*SECTIONS.values(), ZeroFlags, ModelFlags)
FLAGS = (*chain.from_iterable(map(settings_of, FLAG_SECTIONS)), *flags_without_effect())
VOCABULARY = vocabulary(FLAG_SECTIONS, flags_without_effect())
REASONS = MappingProxyType(read_toml(__package__, "json_no_effect.toml"))  # by key of the JSON

log = logging.getLogger("megatron_zpp")


def parse(argv: Sequence[str], world_size: int, program: str = "pretrain_gpt.py") -> Config:
    """The configuration that `argv` (without the program's name) asks for on `world_size` ranks,
    or on as many as --dry-run-ranks says.

    Logs which settings have a default or no effect. Raises InputError for mistakes of the user,
    and SystemExit(0) after printing the help of `program`.
    """
    if any(word in HELP for word in argv):
        print(run_help(argv, program))
        raise SystemExit(0)
    typed = read(argv, VOCABULARY)
    if "dry_run_ranks" in typed:
        world_size = typed["dry_run_ranks"].value
    file = JsonValues()
    if "deepspeed_config" in typed:
        file = read_json(typed["deepspeed_config"].value, ZeroConfig)
    values = merge(typed, file, FLAGS)
    accumulation = file.values.get("gradient_accumulation_steps")
    parallel = _section(ParallelConfig, {**defaults.DEFAULTS, **values})
    parallel.check()
    num_replicas = parallel.num_replicas(world_size)
    alone = file.values.get("zeropp.sync_every", 1) != 1
    if alone and file.values.get("zeropp.sync_store"):  # each node is a launch of its own
        num_replicas *= file.values.get("zeropp.sync_nodes") or 1
    completed = defaults.complete(values, accumulation, num_replicas)
    given = {name: assignment.text for name, assignment in typed.items()}
    sections = {name: _section(kind, completed) for name, kind in SECTIONS.items()}
    config = Config(**sections, given=given)
    check(config, num_replicas)
    _check_accumulation(config.batch, file, num_replicas)
    config = replace(config, zero=_zero(file, completed, config.batch, num_replicas))
    for obstacle, is_met in declared("OBSTACLES", CAPABILITIES):
        if is_met(config):
            raise InputError(obstacle.format(config=config))
    _log_notices(typed, config)
    default_line = defaults.describe(values, completed)
    if default_line:
        log.info("%s", default_line)
    return config


def check(config: Config, num_replicas: int) -> None:
    """Raise InputError for values out of range and for values that do not fit each other."""
    for name in SECTIONS:
        getattr(config, name).check()
    layers, limit = config.recompute.recompute_num_layers, config.model.num_layers
    if config.recompute.recompute_granularity == "full" and layers > limit:
        raise InputError(f"--recompute-num-layers {layers} is more than --num-layers {limit}")
    if config.checkpoint.no_load_lr_state and config.schedule.use_checkpoint_opt_param_scheduler:
        raise InputError(
            "--no-load-lr-state and --use-checkpoint-opt_param-scheduler contradict: leave one out"
        )
    Schedules.of(config).batch_size.check(num_replicas)
    save, pretrained = config.checkpoint.save, config.pretrained_checkpoint
    if save and pretrained and Path(save).resolve() == Path(pretrained).resolve():
        raise InputError(
            f"--save {save} is the folder of --pretrained-checkpoint, where a newer checkpoint "
            "would replace the pretrained one: save to another folder"
        )
    is_elsewhere = config.checkpoint.use_checkpoint_args or pretrained
    if not is_elsewhere:
        require_divisible(config, num_replicas)


def require_pretrained(pretrained: str | None, program: str) -> None:
    """Raise InputError for a run that names no pretrained model to fine-tune."""
    if pretrained is None:
        raise InputError(
            f"{program} needs --pretrained-checkpoint FOLDER, the model to fine-tune: a folder of "
            "checkpoints (tools/convert_hf.py makes one of a Hugging Face model); pretrain_gpt.py "
            "trains from scratch"
        )


def require_divisible(config: Config, num_replicas: int) -> None:
    """Raise InputError for sizes of the model that its ranks cannot share out.

    The program calls it again once it knows a model that the flags only name.
    """
    model, parallel = config.model, config.parallel
    num_stages = len(parallel.stages(model.num_layers))
    size = parallel.pipeline_model_parallel_size
    if num_stages > size:
        Schedules.of(config).batch_size.check(num_replicas, multiple=size)
    tensor, context = parallel.tensor_model_parallel_size, parallel.context_parallel_size
    by_tensor, by_context = (
        f"--tensor-model-parallel-size {tensor}",
        f"--context-parallel-size {context}",
    )
    by_both = f"{by_tensor} times {by_context}"
    heads = "--num-query-groups" if model.num_query_groups else "--num-attention-heads"
    vocabulary = (
        "--pad-vocab-size-to" if model.pad_vocab_size_to else "--make-vocab-size-divisible-by"
    )
    _require_whole_sequences(model, parallel)
    groups = model.kv_heads
    if groups < tensor and tensor % groups == 0 and not model.multi_latent_attention:
        _require_shared_groups(model, tensor)
        groups = tensor
    splits_rows, exchanges_heads = parallel.sequence_parallel, parallel.cp_comm_type == "a2a"
    rows, by_rows = (tensor * context, by_both) if splits_rows else (context, by_context)
    if context > 1 and not exchanges_heads:
        rows, by_rows = 2 * rows, f"{by_rows} in two parts each (--cp-comm-type allgather)"
    for name, count, size, splits in (
        (heads, groups, tensor, by_tensor),
        (
            "--num-attention-heads",
            model.num_attention_heads,
            tensor * (context if exchanges_heads else 1),
            by_both,
        ),
        ("--ffn-hidden-size", model.ffn_size, tensor, by_tensor),
        (vocabulary, model.make_vocab_size_divisible_by, tensor, by_tensor),
        ("--seq-length", model.seq_length, rows, by_rows),
    ):
        if count % size:
            nearest = max(size, round(count / size) * size)
            raise InputError(
                f"{name} {count} cannot be split over {splits}: the nearest that can is {nearest}"
            )


def _require_shared_groups(model: ModelConfig, tensor: int) -> None:
    """Raise InputError for heads of keys and values that `tensor` ranks cannot share."""
    words = f"--num-query-groups {model.kv_heads} below --tensor-model-parallel-size {tensor}"
    for name in ("qk_layernorm_across_heads", "qk_layernorm_per_head"):
        if getattr(model, name):
            raise InputError(
                f"{words}: --{name.replace('_', '-')} needs a key of its own on each rank: lower "
                "the second to the first"
            )
    if 2 * model.kv_heads * model.head_dim % tensor:
        raise InputError(
            f"{words}: the {2 * model.kv_heads} x {model.head_dim} channels of keys and values "
            "cannot be shared out equally: change --kv-channels, or lower the second"
        )


def _require_whole_sequences(model: ModelConfig, parallel: ParallelConfig) -> None:
    """Raise InputError for attention that ranks which share sequences cannot compute."""
    if parallel.context_parallel_size == 1:
        return
    if model.position_embedding_type == "alibi" and parallel.cp_comm_type == "a2a":
        raise InputError(
            "--position-embedding-type alibi with --context-parallel-size "
            f"{parallel.context_parallel_size}: --cp-comm-type a2a moves heads between ranks, "
            "which differ in their slopes: use --cp-comm-type allgather"
        )
    if model.longrope_long_factors and model.seq_length > model.longrope_original_positions:
        raise InputError(
            f"--seq-length {model.seq_length} is longer than --longrope-original-positions "
            f"{model.longrope_original_positions}: LongRoPE's factors depend on whole sequences, "
            "which --context-parallel-size divides: leave it out, or train shorter sequences"
        )


def _section(kind: type[Section], values: Mapping[str, Any]) -> Section:
    return kind(**{flag.name: values[flag.name] for flag in settings_of(kind)})


def _check_accumulation(batch: BatchConfig, file: JsonValues, world_size: int) -> None:
    key = "gradient_accumulation_steps"
    if file.values.get(key) is None:
        return
    steps = batch.global_batch_size // (batch.micro_batch_size * world_size)
    if steps != file.values[key]:
        raise InputError(
            f"{file.assignment(key)} contradicts global batch size {batch.global_batch_size} / "
            f"(micro-batch size {batch.micro_batch_size} x {world_size} data-parallel ranks) = "
            f"{steps}: change one of them"
        )


def _zero(
    file: JsonValues, completed: Mapping[str, Any], batch: BatchConfig, world_size: int
) -> ZeroConfig:
    """The JSON's settings; what the file leaves open is filled in from the flags."""
    from_flags = json_values(completed, FLAGS)
    if batch.rampup_batch_size is None and not batch.batch_sizes:
        per_micro_batch = batch.micro_batch_size * world_size
        from_flags["gradient_accumulation_steps"] = batch.global_batch_size // per_micro_batch
    return ZeroConfig.from_values(file, from_flags)


def _log_notices(typed: Mapping[str, TypedFlag], config: Config) -> None:
    ignored = {
        assignment.text: reason
        for assignment in typed.values()
        if (reason := assignment.flag.why_no_effect(config))
    }
    model = config.model
    if model.has_gelu and not model.bias_gelu_fusion:
        name = "--glu-activation geglu" if model.geglu and "glu_activation" in typed else ""
        name = name or "--no-bias-gelu-fusion"
        log.info("%s: the exact (erf) GELU is used instead of its tanh form", name)
    training = config.training
    if training.train_tokens and (training.train_iters or training.train_samples):
        log.info(
            "--train-tokens and another length: the first to be reached ends the run, "
            "after %d iterations",
            Schedules.of(config).length.iterations,
        )
    for line in config.zero.notices(REASONS, ignored):
        log.info("%s", line)
