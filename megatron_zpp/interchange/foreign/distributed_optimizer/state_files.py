"""distrib_optim.pt of each rank, with the distributed optimizer's state of its parameters."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from megatron_zpp.interchange.foreign.distributed_optimizer.gathered_state import (
    ByKey,
    GatheredState,
)
from megatron_zpp.interchange.foreign.distributed_optimizer.rank_states import RankStates
from megatron_zpp.interchange.foreign.distributed_optimizer.stage_parameters import (
    RankParameters,
    shared_weights,
)
from megatron_zpp.interchange.foreign.pickles import load_pickle
from megatron_zpp.interchange.foreign.rank_parts import SavedGrid
from megatron_zpp.interchange.foreign.tensor_files import REMEDY
from zeropp.errors import InputError, first_few

STATE_FILE = "distrib_optim.pt"
# By stage and tensor rank: of each model chunk the shapes of its parameters in order.
Shapes = Mapping[tuple[int, int], Sequence[Mapping[str, torch.Size]]]


def read_state_files(
    paths: Mapping[tuple[int, int], Path], shapes: Shapes, args: Mapping[str, Any], grid: SavedGrid
) -> ByKey:
    """Return the state in the files of all stages and tensor ranks.

    Raises InputError if files are missing, damaged or not of these parameters, UnmappedStateError
    if they are of a kind that does not say which numbers belong to which weight.
    """
    if missing := [str(path) for path in paths.values() if not path.exists()]:
        raise InputError(
            f"{first_few(missing)}: missing, with the state of the distributed optimizer; copy "
            f"those of all ranks{REMEDY}"
        )
    states = RankStates(
        states=[
            [
                GatheredState.of(load_pickle(paths[stage, rank]), str(paths[stage, rank]))
                for rank in range(grid.tensor_ranks)
            ]
            for stage in sorted({stage for stage, _ in paths})
        ],
        grid=grid,
        args=args,
    )
    chunks = len(shapes[0, 0])
    if states.chunks != chunks:
        raise InputError(
            f"{grid.where}: {STATE_FILE} has the state of {states.chunks} model chunks, but the "
            f"model has {chunks}: mixed up{REMEDY}"
        )
    stages = len(states.states)
    return states.join(
        [_parts(states, paths, shapes, position) for position in range(stages * chunks)]
    )


def _parts(
    states: RankStates, paths: Mapping[tuple[int, int], Path], shapes: Shapes, position: int
) -> list[ByKey]:
    stages = len(states.states)
    chunk, stage = divmod(position, stages)
    shared = shared_weights(states.grid, stages)
    parts = states.parts(
        position,
        lambda rank: RankParameters(shapes=shapes[stage, rank][chunk], own_bucket=shared),
    )
    if None in parts:
        raise InputError(
            f"{paths[stage, parts.index(None)]}: has not as many numbers as the parameters in "
            "model_optim_rng.pt beside it: it is of another checkpoint, or of a very old or new "
            f"version{REMEDY}"
        )
    return parts
