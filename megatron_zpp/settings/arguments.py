"""argv to Config: read the flags, let them agree with the JSON, fill in defaults, check, say.

The result is consistent, frozen and complete: nothing is filled in later. Whatever is wrong ends
with an InputError that names the flag, the value and what to do.
"""

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from megatron_zpp.settings import defaults
from megatron_zpp.settings.agreement import JsonFile, agree, json_values
from megatron_zpp.settings.command_line import HELP, Assignment, help_text, read, vocabulary
from megatron_zpp.settings.config import Config
from megatron_zpp.settings.flag import Section, flags
from megatron_zpp.settings.json_flags import SHORTHANDS, IdleFlags, ModelFlags, ZeroFlags
from megatron_zpp.settings.no_effect import why_idle
from megatron_zpp.settings.schedule import Schedules
from zeropp.errors import InputError
from zeropp.settings.zero_config import ZeroConfig

USAGE = """\
usage: {program} [FLAGS]

GPT pretraining with ZeRO stages 0 to 3; torchrun or zeropp starts it on several ranks. The flags
are Megatron's, and --deepspeed-config names a JSON file with DeepSpeed's keys. Everything has a
default, the data too. The words of a flag may be separated by - or _."""
SECTIONS: Mapping[str, type[Section]] = MappingProxyType(
    {
        item.name: item.default_factory
        for item in dataclasses.fields(Config)
        if isinstance(item.default_factory, type) and issubclass(item.default_factory, Section)
    }
)
SPOKEN = (*SECTIONS.values(), ZeroFlags, ModelFlags, IdleFlags)

log = logging.getLogger("megatron_zpp")


def parse(argv: Sequence[str], world_size: int, program: str = "pretrain_gpt.py") -> Config:
    """The configuration that `argv` (without the program's name) asks for on `world_size` ranks,
    or on as many as --dry-run-ranks says.

    Logs once what has a default or no effect. Raises InputError for what a person has to mend, and
    SystemExit(0) after printing the help.
    """
    if any(word in HELP for word in argv):
        print(help_text(USAGE.format(program=program), SPOKEN, SHORTHANDS))
        raise SystemExit(0)
    typed = read(argv, vocabulary(SPOKEN, SHORTHANDS))
    if "dry_run_ranks" in typed:
        world_size = typed["dry_run_ranks"].value
    path = typed["deepspeed_config"].value if "deepspeed_config" in typed else None
    file = JsonFile.read(path)
    given = agree(typed, file)
    accumulation = file.given.get("gradient_accumulation_steps")
    values = defaults.settled(given, accumulation, world_size)
    config = Config(**{name: _section(kind, values) for name, kind in SECTIONS.items()})
    check(config, world_size)
    _check_accumulation(config, file, world_size)
    config = dataclasses.replace(config, zero=_zero(config, values, file, world_size))
    if config.zero.stores_frozen and not config.lora.lora_rank:
        raise InputError(
            "zero_quantized_nontrainable_weights stores frozen weights quantized, and without "
            "--lora-rank all weights are trained: give a rank (finetune_gpt.py), or leave it out"
        )
    _say(typed, config, defaults.said(given, values))
    return config


def check(config: Config, world_size: int) -> None:
    """Raise InputError for values out of range and for values that do not fit each other."""
    for name in SECTIONS:
        getattr(config, name).check()
    layers, limit = config.recompute.recompute_num_layers, config.model.num_layers
    if config.recompute.recompute_granularity == "full" and layers > limit:
        raise InputError(f"--recompute-num-layers {layers} is more than --num-layers {limit}")
    Schedules.of(config).batch_size.check(world_size)


def _section(kind: type[Section], values: Mapping[str, Any]) -> Section:
    return kind(**{flag.dest: values[flag.dest] for flag in flags(kind) if flag.dest in values})


def _check_accumulation(config: Config, file: JsonFile, world_size: int) -> None:
    key = "gradient_accumulation_steps"
    if file.given.get(key) is None:
        return
    batch = config.batch
    steps = batch.global_batch_size // (batch.micro_batch_size * world_size)
    if steps != file.given[key]:
        raise InputError(
            f"{file.says(key)} contradicts global batch size {batch.global_batch_size} / "
            f"(micro-batch size {batch.micro_batch_size} x {world_size} data-parallel ranks) = "
            f"{steps}: change one of them"
        )


def _zero(config: Config, values: Mapping[str, Any], file: JsonFile, world_size: int) -> ZeroConfig:
    """The JSON's section with every key that the flags and the defaults settle."""
    parts = (getattr(config, name) for name in SECTIONS)
    all_values = {**values, **{k: v for part in parts for k, v in vars(part).items()}}
    settled = json_values(all_values)
    batch = config.batch
    if batch.rampup_batch_size is None:
        per_step = batch.micro_batch_size * world_size
        settled["gradient_accumulation_steps"] = batch.global_batch_size // per_step
    zero = ZeroConfig.from_json(file.content, settled)
    return dataclasses.replace(zero, source=file.name or zero.source)


def _say(typed: Mapping[str, Assignment], config: Config, default_line: str) -> None:
    for assignment in typed.values():
        reason = assignment.flag.no_effect or why_idle(assignment.flag.dest, config)
        if reason:
            log.info("%s has no effect here: %s", assignment, reason)
    if not config.model.bias_gelu_fusion:
        log.info("--no-bias-gelu-fusion: the exact (erf) GELU is used instead of its tanh form")
    training = config.training
    if training.train_tokens and (training.train_iters or training.train_samples):
        log.info(
            "--train-tokens and another length: the first to be reached ends the run, "
            "after %d iterations",
            Schedules.of(config).length.iterations,
        )
    for line in config.zero.notices:
        log.info("%s: %s", config.zero.source, line)
    if default_line:
        log.info("%s", default_line)
