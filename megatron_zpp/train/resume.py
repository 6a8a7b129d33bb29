"""What `--load` names, where independent replicas load or have saved it, and a run that goes on."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from megatron_zpp.checkpoint import checkpoint
from megatron_zpp.checkpoint.iteration_folders import (
    checkpoint_folder,
    checkpoint_name,
    complete_iterations,
    folder_of_node,
    iteration_of,
)
from megatron_zpp.checkpoint.pretrained_model import no_checkpoint_error
from megatron_zpp.checkpoint.training_state import STATE, TrainingState, architecture, read_state
from megatron_zpp.parallel.mesh import Ranks
from megatron_zpp.recipe.capability import states_of
from megatron_zpp.settings.capability_flags import CAPABILITIES
from megatron_zpp.settings.config import CheckpointConfig
from megatron_zpp.settings.data import names_examples
from megatron_zpp.settings.gpt.model import OF_TRAINING
from megatron_zpp.tokenizer.factory import TYPES_WITH_TOKENIZER_JSON
from megatron_zpp.train.inputs import data_bytes
from megatron_zpp.train.run import Run
from megatron_zpp.train.trainer import STATE_COUNTERS, Counters, Trainer
from zeropp import Sharding
from zeropp.capabilities.local_sgd import AveragedBuffers, OfSharding, TrainedWeights
from zeropp.errors import InputError
from zeropp.ranks import broadcast_object, fail_together, rank
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


@dataclass(frozen=True, kw_only=True)
class SavedRun:
    """What `--load` names: the folder and the iteration that this replica loads.

    num_replicas: how many replicas have saved it, the first one in `folder`.
    is_of_each: each replica of this run loads its own checkpoint.
    is_verified: its files have been read and compared already.
    """

    folder: Path
    iteration: int | None
    num_replicas: int = 1
    is_of_each: bool = False
    is_verified: bool = False

    @property
    def is_averaged(self) -> bool:
        """Whether the weights of all that saved it are averaged, as this run has other replicas."""
        return self.num_replicas > 1 and not self.is_of_each

    def average(
        self, sharding: Sharding, optimizer: torch.optim.Optimizer, iteration: int, *, verify: bool
    ) -> None:
        """Replace weights and buffers, those of the first replica, by the means over all."""
        model = OfSharding(sharding)
        weights = TrainedWeights(model=model, optimizer=optimizer)
        buffers = AveragedBuffers(model=model)
        messages = [buffers.message()]
        total = [each.double() for each in weights.read()]
        for node in range(1, self.num_replicas):
            path = folder_of_node(self.folder, node) / checkpoint_name(iteration)
            problem = checkpoint.damage(path, verify=verify)
            if problem is not None:
                raise InputError(f"{path}: {problem}")
            checkpoint.load_weights(path, sharding.model, optimizer)
            for each, term in zip(total, weights.read(), strict=True):
                each += term
            messages.append(buffers.message())
        weights.write([(each / self.num_replicas).float() for each in total])
        buffers.take(messages)
        buffers.merge(0.0)
        log.info(
            f"{self.num_replicas} independent replicas have saved {self.folder}: this run goes on "
            "with the mean of their weights, and the moments of the optimizer are reset"
        )


def saved_run(options: CheckpointConfig, ranks: Ranks) -> SavedRun | None:
    """Return what to load of `--load`; all ranks of all replicas call it.

    As many replicas as have saved it each load their own checkpoint; an elastic one does so unless
    it fine-tunes; in other cases all load the mean. None without `--load`, and for a replica
    that joins without a checkpoint. Raises InputError if there is no iteration that all replicas
    have saved, or if a replica of this run sees none of it.
    """
    if options.load is None:
        return None
    own, replicas = Path(options.load), ranks.replicas
    first = _folder_of_first(options, ranks)
    if replicas.joins_and_leaves and options.finetune:
        return _same_for_all(options, first, _num_saved(first, options.ckpt_step))
    if replicas.joins_and_leaves:
        return _of_elastic(own, replicas.iteration)
    saved_here = _num_saved(own, options.ckpt_step)
    saved_by_first = _num_saved(first, options.ckpt_step) if first != own else saved_here
    views = replicas.gather((saved_here, saved_by_first))
    count, _ = views[0]
    if count == replicas.count > 1 or (count is None and any(own for own, _ in views)):
        _require_all([each is not None for each, _ in views], f"checkpoint of its own in {first}")
        return _of_each(options, ranks, own)
    if replicas.independent:
        what = f"checkpoint in {first}, which all nodes read if another number of nodes saved it"
        _require_all([each == count for _, each in views], what)
    return _same_for_all(options, first, count)


def with_own_folders(options: CheckpointConfig, ranks: Ranks) -> CheckpointConfig:
    """Return the options with the folders of this replica's checkpoints.

    The first one has those that the flags name, and others a folder in each.
    """
    number = ranks.replicas.number
    if not number:
        return options
    save, load = (
        each and str(folder_of_node(Path(each), number)) for each in (options.save, options.load)
    )
    return replace(options, save=save, load=load)


def with_source(
    options: CheckpointConfig, source: SavedRun | None, ranks: Ranks
) -> CheckpointConfig:
    """Return the options with the folder that this replica loads, or else the first one's."""
    if options.load is None or not ranks.replicas.independent:
        return options
    folder = source.folder if source else _folder_of_first(options, ranks)
    return replace(options, load=str(folder))


def _folder_of_first(options: CheckpointConfig, ranks: Ranks) -> Path:
    return Path(options.load).parent if ranks.replicas.number else Path(options.load)


def _same_for_all(options: CheckpointConfig, first: Path, num_replicas: int | None) -> SavedRun:
    """Return what all replicas load, of what `num_replicas` have saved."""
    if num_replicas in (None, 1):
        return SavedRun(folder=first, iteration=options.ckpt_step)
    return _mean_of_others(options, first, num_replicas)


def _of_each(options: CheckpointConfig, ranks: Ranks, own: Path) -> SavedRun:
    """Return the newest checkpoint that each replica of this run has of its own."""
    verify = not options.no_verify_checkpoint
    path = checkpoint.choose(own, verify=verify, iteration=options.ckpt_step)
    chosen = None if path is None else iteration_of(path)
    views = ranks.replicas.gather((chosen, _launches(own)))
    _require_all([each is not None for each, _ in views], f"checkpoint of its own in {own}")
    found, most = [found for _, found in views], min(newest for newest, _ in views)
    iteration = _newest_of_all(found, most, str(own), options.ckpt_step)
    return SavedRun(
        folder=own,
        iteration=iteration,
        num_replicas=ranks.replicas.count,
        is_of_each=True,
        is_verified=verify and iteration == chosen,
    )


def _mean_of_others(options: CheckpointConfig, first: Path, num_replicas: int) -> SavedRun:
    """Return the newest checkpoint that all replicas of another run have saved."""
    path = checkpoint.choose(first, verify=False, iteration=options.ckpt_step)
    folders = [folder_of_node(first, node) for node in range(num_replicas)]
    found = [_launches(each) for each in folders]
    for folder, launches in zip(folders, found, strict=True):
        if not launches:
            raise InputError(
                f"{first} is of {num_replicas} independent replicas, and {folder} has no "
                "complete checkpoint: restore it"
            )
    iteration = _newest_of_all(found, iteration_of(path), str(first), options.ckpt_step)
    return SavedRun(folder=first, iteration=iteration, num_replicas=num_replicas)


def _newest_of_all(
    found: Sequence[Mapping[int, str]], most: int, folder: str, wanted: int | None
) -> int:
    """Return the newest iteration up to `most` that all replicas have saved in one launch.

    found: of each replica, the launches by the iterations that they saved. wanted: the iteration
    that it has to be.
    """
    common = set(found[0].items()).intersection(*(each.items() for each in found[1:]))
    iteration = max((each for each, _ in common if each <= most), default=None)
    if iteration is None or wanted not in (None, iteration):
        lists = "; ".join(
            f"node {node} {', '.join(map(str, each)) or 'none'}" for node, each in enumerate(found)
        )
        what = f"iteration up to {most}" if wanted is None else f"iteration {wanted}"
        together = ", ".join(str(each) for each, _ in sorted(common)) or "none"
        raise InputError(
            f"{folder}: there is no checkpoint of an {what} that all nodes have saved together, in "
            f"one launch; they have those of: {lists}; together those of: {together} "
            "(--ckpt-step names one)"
        )
    return iteration


def _of_elastic(folder: Path, iteration: int) -> SavedRun | None:
    if not iteration:
        return None
    with fail_together():
        saved = read_state(folder / checkpoint_name(iteration)).configuration
    is_of_each = saved.get("zero", {}).get("zeropp", {}).get("sync_every", 1) != 1
    return SavedRun(folder=folder, iteration=iteration, is_of_each=is_of_each)


def _require_all(has: Sequence[bool], what: str) -> None:
    """Raise InputError, on all replicas, that names the first one without a checkpoint."""
    if not all(has):
        raise InputError(f"--load: replica {list(has).index(False)} of {len(has)} has no {what}")


def _launches(folder: Path) -> dict[int, str]:
    """Return which launches have saved the complete checkpoints in a folder, by their iterations.

    As the first rank sees it. Replicas of one launch may have become more or fewer.
    """
    found = {}
    with fail_together():
        for iteration in complete_iterations(folder) if rank() == 0 else ():
            path = folder / checkpoint_name(iteration)
            if (path / STATE).exists():
                state = read_state(path)
                found[iteration] = f"{state.num_worlds} nodes of {state.launch}"
    return broadcast_object(found)


def _num_saved(folder: Path, iteration: int | None) -> int | None:
    """Return how many replicas have saved the newest checkpoint of a folder, or an iteration's.

    None if there is none. Checkpoints of other programs count as one replica's.
    """
    with fail_together():
        number = None
        if rank() == 0:
            latest = checkpoint_folder(folder).latest() if iteration is None else str(iteration)
            is_number = latest is not None and latest.isdecimal()
            path = folder / checkpoint_name(int(latest)) if is_number else folder
            found = complete_iterations(folder)
            if not (path / STATE).exists() and found:
                path = folder / checkpoint_name(found[-1])
            if (path / STATE).exists():
                number = read_state(path).num_worlds
            elif latest is not None:
                number = 1
    return broadcast_object(number)


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
