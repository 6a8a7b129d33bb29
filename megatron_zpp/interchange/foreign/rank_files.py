"""Megatron-LM's legacy checkpoints: mp_rank_XX[_YYY]/model_optim_rng.pt of each rank.

XX is the tensor-parallel rank, YYY the pipeline stage. Each file holds its rank's part of the model
and the optimizer's state by numbers, which follow the order of the parameters in groups; that of
the distributed optimizer is in distrib_optim.pt beside it (distributed_optimizer/).
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron_zpp.interchange.foreign.distributed_optimizer.gathered_state import MAIN, ByKey
from megatron_zpp.interchange.foreign.distributed_optimizer.state_files import (
    STATE_FILE,
    Shapes,
    read_state_files,
)
from megatron_zpp.interchange.foreign.main_weights import with_main_weights
from megatron_zpp.interchange.foreign.megatron_args import args_in
from megatron_zpp.interchange.foreign.pickles import load_pickle
from megatron_zpp.interchange.foreign.rank_parts import (
    SavedGrid,
    flat_tensors,
    join_stages,
    joined_by_capability,
)
from megatron_zpp.interchange.foreign.tensor_files import (
    MOMENTUM,
    NOT_ASKED_FOR,
    NOT_TAKEN,
    ForeignCheckpoint,
    LazyTensor,
    NamedTensors,
    UnmappedStateError,
)
from zeropp.errors import InputError, first_few
from zeropp.optim import MOMENTS

MASTERS = ("fp32_from_fp16_params", "fp32_from_fp16")
FIRST_VERSION = 2.0  # before, queries, keys and values were ordered otherwise
Files = dict[tuple[int, int], dict[str, Any]]  # contents by pipeline stage and tensor rank
Paths = dict[tuple[int, int], Path]


def read_rank_files(folder: Path, *, load_optimizer: bool = True) -> ForeignCheckpoint:
    """Return what is in a checkpoint; raises InputError if it is damaged or incomplete."""
    paths = _paths(folder)
    files = _load(paths, folder)
    first = files[0, 0]
    args = args_in(first, str(folder))
    if (version := first.get("checkpoint_version", 0)) < FIRST_VERSION:
        raise InputError(
            f"{folder}: is of checkpoint version {version}, whose queries, keys and values are in "
            f"another order; let Megatron-LM load and save it to have version {FIRST_VERSION} or 3"
        )
    grid = SavedGrid.of(args, str(folder), 1 + max(rank for _, rank in files))
    weights = join_stages(_stages(files, grid, _model_parts), grid)
    weights = joined_by_capability(weights, grid.where)
    reason, state, step = NOT_ASKED_FOR, {}, 0.0
    if load_optimizer:
        try:
            state, step, reason = _state_of_all(paths, files, grid), _step(first), ""
        except UnmappedStateError as error:
            reason, state = str(error), {}
    weights = with_main_weights(weights, state.pop(MAIN, {}), str(folder))
    return ForeignCheckpoint(
        weights=NamedTensors(str(folder), weights),
        moments={key: NamedTensors(f"{folder}: {key}", each) for key, each in state.items()},
        step=step,
        without_moments=reason,
        iteration=int(first.get("iteration") or 0),
        args=args,
    )


def _state_of_all(paths: Paths, files: Files, grid: SavedGrid) -> ByKey:
    """Return Adam's moments, and fp32 weights if it has them.

    Raises UnmappedStateError if they cannot be mapped to weights.
    """
    if any(MOMENTUM in each for each in _all_states(files[0, 0])):
        raise UnmappedStateError(NOT_TAKEN)
    states = {each: path.parent / STATE_FILE for each, path in paths.items()}
    if any(path.exists() for path in states.values()):
        return read_state_files(states, _shapes(files), args_in(files[0, 0], grid.where), grid)
    if any("params" not in group for group in _groups(files[0, 0])):
        raise UnmappedStateError(
            f"it is the distributed optimizer's, whose {STATE_FILE} is not there"
        )
    state = {key: join_stages(_stages(files, grid, _of(key)), grid) for key in MOMENTS}
    if any(key in _optimizer(files[0, 0]) for key in MASTERS):
        state[MAIN] = join_stages(_stages(files, grid, _masters), grid)
    return state


def _shapes(files: Files) -> Shapes:
    """Return the shapes of the parameters of each stage and tensor rank, by model chunk."""
    return {
        each: [
            {name: tensor.shape for name, tensor in _model_parts(content, chunk).items()}
            for chunk in _chunks(files)
        ]
        for each, content in files.items()
    }


def _paths(folder: Path) -> Paths:
    """Return the files of all ranks."""
    paths = {}
    for path in sorted(folder.glob("mp_rank_*/model*_rng.pt")):
        match = re.fullmatch(r"mp_rank_(\d+)(?:_(\d+))?(_\d+)?", path.parent.name)
        if match is None or match[3]:
            raise InputError(
                f"{path}: is of a rank that has some experts only, which is not read: let "
                "Megatron-LM save it with --ckpt-format torch_dist"
            )
        paths[int(match[2] or 0), int(match[1])] = path
    return paths


def _load(paths: Paths, folder: Path) -> Files:
    """Read the files of all ranks, after checking that none is missing."""
    first = load_pickle(paths[min(paths)])
    args = args_in(first, str(paths[min(paths)]))
    stages = args.get("pipeline_model_parallel_size") or 1 + max(stage for stage, _ in paths)
    ranks = args.get("tensor_model_parallel_size") or 1 + max(rank for _, rank in paths)
    wanted = [(stage, rank) for stage in range(stages) for rank in range(ranks)]
    if missing := [each for each in wanted if each not in paths]:
        names = [f"tensor rank {rank} of stage {stage}" for stage, rank in missing]
        raise InputError(
            f"{folder}: was saved by {ranks} tensor ranks x {stages} pipeline stages, and "
            f"{first_few(names)} is missing"
        )
    if len(wanted) != len(paths):
        raise InputError(
            f"{folder}: has files of {len(paths)} ranks, but was saved by {len(wanted)}: files of "
            "another run are among them"
        )
    files = {each: load_pickle(paths[each]) for each in wanted}
    iterations = {content.get("iteration") for content in files.values()}
    if len(iterations) > 1:
        raise InputError(f"{folder}: its files are of iterations {sorted(iterations)}: mixed up")
    return files


def _stages(files: Files, grid: SavedGrid, parts_of: Any) -> list[list[dict[str, LazyTensor]]]:
    """Return the parts [stage][tensor rank] in the order of the model's layers.

    With interleaved stages each rank has several chunks, the first of all ranks before the second.
    """
    num_stages = 1 + max(stage for stage, _ in files)
    chunks = _chunks(files)
    return [
        [
            {
                name: LazyTensor.of(tensor)
                for name, tensor in parts_of(files[stage, rank], chunk).items()
            }
            for rank in range(grid.tensor_ranks)
        ]
        for chunk in chunks
        for stage in range(num_stages)
    ]


def _chunks(files: Files) -> list[str]:
    """Return the keys of the model's chunks, in order."""
    keys = [key for key in files[0, 0] if re.fullmatch(r"model\d*", key)]
    return sorted(keys, key=lambda key: int(key.removeprefix("model") or 0))


def _model_parts(content: Mapping[str, Any], chunk: str) -> dict[str, Tensor]:
    return flat_tensors(content[chunk])


def _of(key: str) -> Any:
    """Return a function for the parts of a moment."""
    return lambda content, chunk: {
        name: _state(content)[index].get(key, None)
        for name, index in _numbers(content, chunk).items()
    }


def _masters(content: Mapping[str, Any], chunk: str) -> dict[str, Tensor]:
    optimizer = _optimizer(content)
    groups = next(optimizer[key] for key in MASTERS if key in optimizer)
    numbers = [number for group in _groups(content) for number in group["params"]]
    by_number = dict(zip(numbers, (each for group in groups for each in group), strict=False))
    masters = {name: by_number.get(number) for name, number in _numbers(content, chunk).items()}
    if any(master is None for master in masters.values()):
        raise UnmappedStateError("it does not hold the fp32 weights of all parameters")
    return masters


def _numbers(content: Mapping[str, Any], chunk: str) -> dict[str, int]:
    """Return the optimizer's number of each parameter, which counts group by group.

    One group holds what has weight decay, the other biases and all else of one dim; each in the
    order of the model. Raises UnmappedStateError unless that explains all shapes.
    """
    if chunk != "model":
        raise UnmappedStateError("the optimizer of interleaved stages numbers its state by chunks")
    tensors, state, numbers = flat_tensors(content[chunk]), _state(content), {}
    spared = {name for name, each in tensors.items() if each.ndim == 1 or name.endswith(".bias")}
    for group in _groups(content):
        is_spared = group.get("wd_mult", 1.0) == 0.0 or not group.get("weight_decay", 1.0)
        names = [name for name in tensors if (name in spared) == is_spared]
        if len(names) != len(group["params"]):
            raise UnmappedStateError(
                "its groups of parameters are not those with and without decay"
            )
        numbers |= dict(zip(names, group["params"], strict=True))
    for name, number in numbers.items():
        moment = state.get(number, {}).get(MOMENTS[0])
        if moment is None or moment.shape != tensors[name].shape:
            raise UnmappedStateError(f"its state does not fit the shape of {name}")
    if numbers.keys() != tensors.keys():
        raise UnmappedStateError("it does not hold the state of all parameters")
    return numbers


def _optimizer(content: Mapping[str, Any]) -> Mapping[str, Any]:
    optimizer = content.get("optimizer")
    if not isinstance(optimizer, Mapping):
        raise UnmappedStateError("there is none in it")
    return optimizer


def _groups(content: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    optimizer = _optimizer(content)
    return optimizer.get("optimizer", optimizer).get("param_groups", [])


def _state(content: Mapping[str, Any]) -> Mapping[int, Mapping[str, Any]]:
    optimizer = _optimizer(content)
    return optimizer.get("optimizer", optimizer).get("state", {})


def _all_states(content: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the state of each parameter, of one optimizer or of several in a chain."""
    optimizer = content.get("optimizer")
    for each in optimizer if isinstance(optimizer, Sequence) else [optimizer]:
        if isinstance(each, Mapping):
            state = each.get("optimizer", each).get("state", {})
            yield from state.values() if isinstance(state, Mapping) else state


def _step(content: Mapping[str, Any]) -> float:
    """Return how many updates Adam made: in the state of each parameter, or in the groups."""
    places = [*_state(content).values(), *_groups(content)]
    steps = [float(place["step"]) for place in places if place.get("step") is not None]
    if not steps:
        raise UnmappedStateError("it does not say how many updates were made")
    return steps[0]
