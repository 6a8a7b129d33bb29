"""Flags and JSON to `Config`: read, merge, complete, check, and log what has no effect.

Whatever is wrong raises an InputError that names the flag or key, its value, and what to do.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

from megatron_zpp.settings import defaults
from megatron_zpp.settings.command_line import HELP, read, vocabulary
from megatron_zpp.settings.config import SECTIONS, BatchConfig, Config, ParallelConfig
from megatron_zpp.settings.flag import Section
from megatron_zpp.settings.flags_without_effect import flags_without_effect
from megatron_zpp.settings.gpt.model import ModelFlags
from megatron_zpp.settings.json_flags import ZeroFlags, json_values, merge
from megatron_zpp.settings.run_help import run_help
from zeropp import ZeroConfig
from zeropp.errors import InputError
from zeropp.settings import JsonValues, read_json, settings_of

FLAG_SECTIONS = (*SECTIONS.values(), ZeroFlags, ModelFlags)
FLAGS = (*chain.from_iterable(map(settings_of, FLAG_SECTIONS)), *flags_without_effect())
VOCABULARY = vocabulary(FLAG_SECTIONS, flags_without_effect())

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
    accumulation = file.values.get("gradient_accumulation_steps")
    parallel = _section(ParallelConfig, {**defaults.DEFAULTS, **values})
    parallel.check()
    num_replicas = parallel.data_parallel_size(world_size)
    alone = file.values.get("zeropp.sync_every", 1) != 1
    if alone and file.values.get("zeropp.sync_store"):  # each node is a launch of its own
        num_replicas *= file.values.get("zeropp.sync_nodes") or 1
    completed = defaults.complete(values, accumulation, num_replicas)
    given = {name: assignment.text for name, assignment in typed.items()}
    sections = {name: _section(kind, completed) for name, kind in SECTIONS.items()}
    config = Config(**sections, given=given)
    config.check(num_replicas)
    _check_accumulation(config.batch, file, num_replicas)
    config = replace(config, zero=_zero(file, completed, config.batch, num_replicas))
    config.require_none_of("OBSTACLES")
    for line in config.notices(typed.values()):
        log.info("%s", line)
    default_line = defaults.describe(values, completed)
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
