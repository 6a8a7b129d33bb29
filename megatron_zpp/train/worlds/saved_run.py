"""What `--load` names, where nodes step alone or have done so: a checkpoint of each world."""

import logging
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron_zpp.checkpoint import checkpoint
from megatron_zpp.checkpoint.iteration_folders import checkpoint_folder, checkpoint_name
from megatron_zpp.checkpoint.training_state import STATE, read_state
from megatron_zpp.parallel.mesh import Ranks
from megatron_zpp.settings.config import CheckpointConfig
from megatron_zpp.train.worlds.own_folders import folder_of
from zeropp import Sharding
from zeropp.errors import InputError
from zeropp.optim.local_steps.held_model import OfSharding
from zeropp.optim.local_steps.trained_weights import TrainedWeights
from zeropp.ranks.coordination import broadcast_object, fail_together, rank

log = logging.getLogger("megatron_zpp")


@dataclass(frozen=True, kw_only=True)
class SavedRun:
    """What `--load` names: the folder and the iteration that this world loads.

    num_worlds: how many nodes that stepped alone have saved it, the first one in `folder`.
    is_of_each: each world of this run loads its own.
    """

    folder: Path
    iteration: int | None
    num_worlds: int = 1
    is_of_each: bool = False

    @property
    def is_averaged(self) -> bool:
        """Whether the weights of all that saved it are averaged."""
        return self.num_worlds > 1 and not self.is_of_each

    def average(self, sharding: Sharding, optimizer: torch.optim.Optimizer, iteration: int) -> None:
        """Let the weights, which are those of the first world, be the mean of all."""
        weights = TrainedWeights(model=OfSharding(sharding), optimizer=optimizer)
        total = [each.double() for each in weights.read()]
        for node in range(1, self.num_worlds):
            path = Path(folder_of(str(self.folder), node)) / checkpoint_name(iteration)
            if not path.is_dir():
                raise InputError(
                    f"{self.folder} is of {self.num_worlds} nodes that stepped alone, and {path} "
                    "is missing: restore it, or name one that all have saved by --ckpt-step"
                )
            checkpoint.load_weights(path, sharding.model, optimizer)
            for each, term in zip(total, weights.read(), strict=True):
                each += term
        weights.write([(each / self.num_worlds).float() for each in total])
        log.info(
            f"{self.num_worlds} nodes that stepped alone have saved {self.folder}: this run goes "
            "on with the mean of their weights, and the moments of the optimizer start anew"
        )


def saved_run(options: CheckpointConfig, ranks: Ranks) -> SavedRun | None:
    """Return what to load of `--load`; all ranks of all worlds call it.

    None for a node that begins or joins without a checkpoint, where nodes come and go. Raises
    InputError if this run's worlds have no checkpoint of the same iteration.
    """
    own = Path(options.load)
    first = own.parent if ranks.outer and ranks.outer.number else own
    if ranks.elastic and not options.finetune:
        return _own_run(own, ranks.elastic.iteration)
    num_worlds = _saved_worlds(first)
    if num_worlds != ranks.num_worlds or ranks.outer is None:
        return SavedRun(folder=first, iteration=options.ckpt_step, num_worlds=num_worlds)
    verify = not options.no_verify_checkpoint
    path = checkpoint.choose(own, verify=verify, iteration=options.ckpt_step)
    iterations = ranks.outer.gather(None if path is None else read_state(path).iteration)
    if None in iterations:
        raise InputError(
            f"{first} is of {num_worlds} nodes that stepped alone, and node "
            f"{iterations.index(None)} has no checkpoint there"
        )
    return SavedRun(folder=own, iteration=min(iterations), num_worlds=num_worlds, is_of_each=True)


def newest_iteration(options: CheckpointConfig, number: int) -> int:
    """Return how far the checkpoint is that the node with a number goes on from; 0 without one."""
    if options.load is None or options.finetune:
        return 0
    folder = Path(folder_of(options.load, number) if number else options.load)
    if options.ckpt_step is not None:
        return options.ckpt_step if (folder / checkpoint_name(options.ckpt_step)).is_dir() else 0
    latest = checkpoint_folder(folder).latest()
    return int(latest) if latest is not None and latest.isdecimal() else 0


def _own_run(folder: Path, iteration: int) -> SavedRun | None:
    if not iteration:
        return None
    with fail_together():
        saved = read_state(folder / checkpoint_name(iteration)).configuration
    is_of_each = saved.get("zero", {}).get("zeropp", {}).get("sync_every", 1) != 1
    return SavedRun(folder=folder, iteration=iteration, is_of_each=is_of_each)


def _saved_worlds(folder: Path) -> int:
    """Return how many worlds have saved the newest checkpoint of a folder; 1 if there is none."""
    with fail_together():
        latest = checkpoint_folder(folder).latest() if rank() == 0 else None
        is_number = latest is not None and latest.isdecimal()
        path = folder / checkpoint_name(int(latest)) if is_number else folder
        number = read_state(path).num_worlds if (path / STATE).exists() else 1
    return broadcast_object(number)
