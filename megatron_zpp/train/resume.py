"""Between a run and its checkpoints: what goes in beside the tensors, and what comes out."""

import dataclasses
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from megatron_zpp.checkpoint import checkpoint
from megatron_zpp.checkpoint.checkpoint_args import no_checkpoint_error
from megatron_zpp.checkpoint.training_state import TrainingState, architecture, run_settings
from megatron_zpp.settings.config import Config
from megatron_zpp.settings.schedule import Schedules
from megatron_zpp.train.run import Counters, Run
from zeropp import InputError, LossScaler, Sharding

COUNTED = tuple(field.name for field in dataclasses.fields(Counters))
IN_STATE = tuple(name for name in COUNTED if name not in ("scheduled_samples", "saved_iteration"))
# What the order of the samples follows from, by section.
ORDERING = (
    ("training", ("seed",)),
    ("model", ("seq_length",)),
    ("data", ("data_path", "train_data_path", "split", "dataloader_type")),
)

log = logging.getLogger("megatron_zpp")


@dataclass(frozen=True, kw_only=True)
class Resumed:
    """Where a run starts: at zero, or where the loaded checkpoint stands."""

    counters: Counters
    schedules: Schedules
    history: Mapping[str, Any]


def save(run: Run) -> None:
    """Save the whole run, if `--save` names a folder."""
    config, counters = run.config, run.counters
    if config.checkpoint.save is None:
        return
    run.metrics.flush()
    counters.saved_iteration = counters.iteration
    state = TrainingState(
        **{name: getattr(counters, name) for name in IN_STATE},
        seed=config.training.seed,
        world_size=run.ranks.num_ranks,
        stage=run.sharding.stage,
        tokenizer=run.tokenizer.fingerprint,
        loss_scaler=run.scaler.state_dict() if run.scaler else {},
        schedule={"scheduled_samples": counters.scheduled_samples, **run.schedules.state()},
        history=run.metrics.history.state_dict(),
        architecture=architecture(config.model, run.tokenizer.vocab_size),
        configuration=run_settings(config),
    )
    path = checkpoint.save(
        config.checkpoint.save,
        run.sharding.model,
        run.optimizer,
        state,
        keep=config.checkpoint.keep_checkpoints,
        save_optimizer=not config.checkpoint.no_save_optim,
    )
    run.console.line(f"saved checkpoint {path}")


def load(
    config: Config,
    sharding: Sharding,
    optimizer: torch.optim.Optimizer,
    scaler: LossScaler | None,
    tokenizer_fingerprint: str,
) -> Resumed:
    """Fill weights, optimizer and scaler from the newest checkpoint in `--load`, if any."""
    chosen, schedules = config.checkpoint, Schedules.of(config)
    state, model = None, sharding.model
    if chosen.load is not None:
        state = checkpoint.load(
            chosen.load,
            model,
            optimizer,
            load_optimizer=not (chosen.no_load_optim or chosen.finetune),
            architecture=architecture(config.model, model.vocab_size),
            tokenizer=tokenizer_fingerprint,
        )
        sharding.weights_changed()
    if state is None:
        for name in ("exit_on_missing_checkpoint", "finetune"):
            if chosen.load is not None and getattr(chosen, name):
                raise no_checkpoint_error(chosen.load, f"--{name.replace('_', '-')}")
        if chosen.load is not None:
            log.info("--load %s holds no checkpoint: the run starts at its beginning", chosen.load)
        return Resumed(counters=Counters(), schedules=schedules, history={})
    log.info("loaded checkpoint of iteration %d from %s", state.iteration, chosen.load)
    _require_same_adapters(config, state)
    if scaler and state.loss_scaler and not (chosen.no_load_optim or chosen.finetune):
        scaler.load_state_dict(state.loss_scaler)
    if chosen.finetune or chosen.reset_iteration or not state.iteration:
        return Resumed(counters=Counters(), schedules=schedules, history={})
    for line in other_order(run_settings(config), state.configuration):
        log.info("%s: other samples come next than without that change", line)
    return Resumed(
        counters=Counters(
            **{name: getattr(state, name) for name in IN_STATE},
            scheduled_samples=state.schedule["scheduled_samples"],
            saved_iteration=state.iteration,
        ),
        schedules=schedules.resumed(state.schedule, config.schedule),
        history=state.history,
    )


def other_order(here: Mapping[str, Any], saved: Mapping[str, Any]) -> list[str]:
    """The settings by which the samples of a resumed run follow another order than before."""
    now = json.loads(json.dumps(here))  # tuples become lists, as in the checkpoint
    return [
        f"{name} is {now[section][name]} now, {saved[section][name]} in the checkpoint"
        for section, names in ORDERING
        for name in names
        if now[section][name] != saved[section][name]
    ]


def _require_same_adapters(config: Config, state: TrainingState) -> None:
    """Raise InputError where loaded adapters would count otherwise than they did; say it where they
    stand beside another model."""
    here, saved = config.lora, state.configuration.get("lora", {})
    if not here.lora_rank or not saved.get("lora_rank"):
        return
    if here.scaling != saved["lora_alpha"] / saved["lora_rank"]:
        raise InputError(
            f"--lora-alpha {here.lora_alpha:g}: the adapters in {config.checkpoint.load} were "
            f"trained with {saved['lora_alpha']:g}, and would be others with any other: give that"
        )
    if here.pretrained_checkpoint != saved["pretrained_checkpoint"]:
        log.info(
            "the adapters in %s were trained beside %s, not %s: they fit no other weights",
            config.checkpoint.load, saved["pretrained_checkpoint"], here.pretrained_checkpoint,
        )  # fmt: skip
