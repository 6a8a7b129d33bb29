"""Starts a run from a checkpoint."""

import logging
from collections.abc import Mapping, Sequence

import torch

from megatron_zpp.checkpoint import checkpoint
from megatron_zpp.checkpoint.pretrained_model import no_checkpoint_error
from megatron_zpp.checkpoint.training_state import TrainingState, architecture
from megatron_zpp.recipe.capability import states_of
from megatron_zpp.settings.capability_flags import CAPABILITIES
from megatron_zpp.settings.data import names_examples
from megatron_zpp.settings.gpt.model import OF_TRAINING
from megatron_zpp.tokenizer.factory import TYPES_WITH_TOKENIZER_JSON
from megatron_zpp.train.inputs import data_bytes
from megatron_zpp.train.run import Run
from megatron_zpp.train.saved_run import SavedRun
from megatron_zpp.train.trainer import STATE_COUNTERS, Counters, Trainer
from zeropp.settings import declared

PLAIN = "tokenizer_hf_no_include_special_tokens"  # older checkpoints do not have it
# Settings that determine the order of the samples, by section.
SAMPLE_ORDER = (
    ("training", ("seed",)),
    ("tokenizer", (PLAIN,)),
    ("model", ("seq_length",)),
    ("data", ("data_path", "train_data_path", "split", "split_ranges", "dataloader_type")),
    ("fim", ("fim_rate", "fim_spm_rate", "fim_split_sample", "fim_fragment_rate")),
)
LENGTH = ("training", ("train_iters", "train_samples", "train_tokens"))  # in older checkpoints
# Settings that determine updates, besides those of schedules, which have lines of their own.
CHANGED_UPDATES = "%s: this changes the updates that come next"
UPDATES = (
    ("optimizer", ("optimizer", "clip_grad", "adam_beta1", "adam_beta2", "adam_eps")),
    ("precision", ("fp16", "bf16", "loss_scale", "loss_scale_window", "hysteresis")),
    ("training", ("calculate_per_token_loss",)),
    ("model", OF_TRAINING),
    *declared("UPDATES", CAPABILITIES),
)

log = logging.getLogger("megatron_zpp")


def load(run: Run, source: SavedRun | None) -> None:
    """Let a run go on from what `--load` names, if any: `source`.

    All ranks call it. Replicas that train independently load each its own; if their number has
    changed, weights are averaged. Raises InputError for a checkpoint that does not fit the run.
    """
    config, ranks, trainer = run.config, run.ranks, run.trainer
    options, replicas, capabilities = config.checkpoint, ranks.replicas, trainer.capabilities
    if source is None:
        is_needed = options.exit_on_missing_checkpoint or options.ckpt_step is not None
        if options.load and is_needed and not replicas.joins:
            raise no_checkpoint_error(options.load, "--ckpt-step or --exit-on-missing-checkpoint")
        return
    reads_agreed = replicas.joins_and_leaves  # they form no mean of their weights
    without = options.finetune or (options.no_load_optim and not reads_agreed)
    starts_anew = without or not source.is_of_each
    others = {} if starts_anew else replicas.state()
    own = {} if without or source.is_averaged else states_of(capabilities)
    state = _read(run, source, {**others, **own})
    for each in capabilities if state is not None and own else ():
        each.load({name: own[name] for name in each.state()})
    replicas.resume(others, source, state, options, config.parallel, ranks)
    if state is None:
        if options.exit_on_missing_checkpoint:
            raise no_checkpoint_error(options.load, "--exit-on-missing-checkpoint")
        if options.finetune:
            raise no_checkpoint_error(options.load, "--finetune")
        log.info("--load %s holds no checkpoint: starting from the beginning", options.load)
        return
    log.info("loaded checkpoint of iteration %d from %s", state.iteration, options.load)
    for each in capabilities:
        each.require_saved(state.configuration, options.load)
    if trainer.scaler and state.loss_scaler and not (options.no_load_optim or options.finetune):
        trainer.scaler.load_state_dict(state.loss_scaler)
    if options.finetune or options.reset_iteration or not state.iteration:
        return
    _log_other_settings(trainer, state)
    scheduled_samples = 0
    if not options.no_load_lr_state:
        scheduled_samples = state.schedule["scheduled_samples"]
        trainer.schedules = trainer.schedules.resumed(state.schedule, config.schedule)
    trainer.counters = Counters(
        **{name: getattr(state, name) for name in STATE_COUNTERS},
        scheduled_samples=scheduled_samples,
        saved_iteration=state.iteration,
    )
    if state.history:
        run.metrics.history.load_state_dict(state.history)
    run.batches.go_behind(_earlier_sizes(config.sample_sizes, state.sample_sizes))


def _read(run: Run, source: SavedRun, others: Mapping[str, torch.Tensor]) -> TrainingState | None:
    """Read a checkpoint, or the mean of those of other nodes, into weights and optimizer.

    `others` are further tensors to read.
    """
    config, sharding, optimizer = run.config, run.trainer.sharding, run.trainer.optimizer
    options, model = config.checkpoint, sharding.model
    load_optimizer = not (options.no_load_optim or options.finetune or source.is_averaged)
    sharding.weights_changed()
    state = checkpoint.load(
        source.folder,
        model,
        optimizer,
        load_optimizer=load_optimizer,
        architecture=architecture(config.model, model.vocab_size),
        tokenizer=run.tokenizer.fingerprint,
        verify=not options.no_verify_checkpoint and not source.is_verified,
        iteration=source.iteration,
        fine_tunes=options.finetune,
        others=others,
    )
    if state is not None and source.is_averaged:
        verify = not options.no_verify_checkpoint
        source.average(sharding, optimizer, state.iteration, verify=verify)
    return state


def _log_other_settings(trainer: Trainer, state: TrainingState) -> None:
    """Log a line for each setting whose change gives the resumed run other samples or updates."""
    config = trainer.config
    batch, saved = config.batch.global_batch_size, state.configuration["batch"]["global_batch_size"]
    if batch != saved:
        log.info(
            f"the global batch has {batch} samples, but {saved} in the checkpoint: "
            f"--global-batch-size {saved} continues as before"
        )
    keeps_order = state.sample_sizes or names_examples(config.data)
    of_samples = (*SAMPLE_ORDER, *(() if keeps_order else (LENGTH,)))
    lines = config.changes(state.configuration, of_samples)
    lines += [
        f"{path} has {now} bytes now, {state.data_bytes[path]} in the checkpoint"
        for path, now in data_bytes(config.data).items()
        if now != state.data_bytes.get(path, now)
    ]
    reads_text = names_examples(config.data) or config.fim.fim_rate
    is_older = PLAIN not in state.configuration["tokenizer"]
    if reads_text and is_older and config.tokenizer.kind in TYPES_WITH_TOKENIZER_JSON:
        lines.append("the checkpoint's version read special tokens in texts as ordinary text")
    for line in lines:
        log.info("%s: this changes which samples come next", line)
    updates = config.changes(state.configuration, UPDATES)
    for each in trainer.capabilities:
        updates += each.changes(state.configuration, state.world_size)
    for line in updates:
        log.info(CHANGED_UPDATES, line)


def _earlier_sizes(sizes: Sequence[int], saved: list[list[int]]) -> list[list[int]]:
    """Return the sizes of datasets before the checkpoint, if they differ; a line says so."""
    now = list(sizes)
    if saved and saved[-1] != now:
        log.info(
            f"the order of samples was made for {saved[-1][0]}, and this run asks for {now[0]}: "
            "it goes on behind them, so that the length does not change which samples come next"
        )
    return saved[:-1] if saved and saved[-1] == now else saved
