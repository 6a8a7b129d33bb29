"""Megatron-DeepSpeed's checkpoints: mp_rank_XX_model_states.pt, and ZeRO's parts of each rank.

ZeRO saves fp32 weights and Adam's moments as flat vectors, a part of which each data-parallel rank
has. At stages 1 and 2 the vector of a group of parameters is cut at equal lengths; at stage 3 each
parameter is cut, its end padded, and a rank has its parts of all parameters one after another.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_zpp.interchange.foreign.megatron_args import args_in
from megatron_zpp.interchange.foreign.megatron_names import core_names
from megatron_zpp.interchange.foreign.pickles import load_pickle
from megatron_zpp.interchange.foreign.rank_parts import SavedGrid, flat_tensors, join_stages
from megatron_zpp.interchange.foreign.tensor_files import (
    MOMENTUM,
    NOT_TAKEN,
    REMEDY,
    ForeignCheckpoint,
    LazyTensor,
    NamedTensors,
)
from zeropp.errors import InputError, first_few
from zeropp.optim import MOMENTS

MODEL_FILES = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
STATE_FILES = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
WEIGHTS = "weights"
STAGE_3 = "fp32_flat_groups"
STAGES_1_2 = "single_partition_of_fp32_groups"
Files = dict[tuple[int, int], dict[str, Any]]  # contents by data-parallel and tensor rank


def read_zero_files(folder: Path, *, load_optimizer: bool = True) -> ForeignCheckpoint:
    """Return what is in a checkpoint; raises InputError if it is damaged or incomplete."""
    models, states = _load(folder, MODEL_FILES), _load(folder, STATE_FILES)
    first = _first(models, folder)
    grid = grid_of(first, folder)
    require_no_pipeline(first, folder)
    _require_all(folder, states, first.get("dp_world_size"), grid.tensor_ranks)
    _require_all(folder, models, 1 + max(data for data, _ in models), grid.tensor_ranks)
    steps = {content.get("global_steps") for content in models.values()}
    if len(steps) > 1:
        raise InputError(f"{folder}: its files are of steps {sorted(steps)}: mixed up")
    keys = (WEIGHTS, *MOMENTS) if load_optimizer else (WEIGHTS,)
    joined = {key: join_stages([_parts(models, states, grid, key)], grid) for key in keys}
    return ForeignCheckpoint(
        weights=NamedTensors(str(folder), joined.pop(WEIGHTS)),
        moments={key: NamedTensors(f"{folder}: {key}", each) for key, each in joined.items()},
        step=_step(states[0, 0], folder) if load_optimizer else 0.0,
        iteration=iteration_of(first),
        args=args_in(first, str(folder)),
    )


def read_model_files(folder: Path) -> ForeignCheckpoint:
    """Return what is in a checkpoint without ZeRO: the weights alone."""
    if any(folder.glob("layer_*-model_states.pt")):
        raise InputError(
            f"{folder}: was saved by DeepSpeed's pipeline engine without ZeRO: such layers cannot "
            "be imported; make it universal with ds_to_universal.py, and import that"
        )
    models = _load(folder, MODEL_FILES)
    first = _first(models, folder)
    grid = grid_of(first, folder)
    _require_all(folder, models, 1, grid.tensor_ranks)
    parts = [
        {
            name: LazyTensor.of(each)
            for name, each in flat_tensors(models[0, rank]["module"]).items()
        }
        for rank in range(grid.tensor_ranks)
    ]
    return ForeignCheckpoint(
        weights=NamedTensors(str(folder), join_stages([parts], grid)),
        without_moments="without ZeRO it is saved by numbers that do not say which weight is meant",
        iteration=iteration_of(first),
        args=args_in(first, str(folder)),
    )


def grid_of(content: Mapping[str, Any], folder: Path) -> SavedGrid:
    """Return the ranks that saved a checkpoint; raises InputError without Megatron's arguments."""
    args = args_in(content, str(folder))
    if not args:
        raise InputError(
            f"{folder}: has no arguments of Megatron-DeepSpeed in it, so it does not say what its "
            "model is: only checkpoints of Megatron-DeepSpeed's GPT are imported"
        )
    return SavedGrid.of(args, str(folder), content.get("mp_world_size"))


def require_no_pipeline(content: Mapping[str, Any], folder: Path) -> None:
    """Raise InputError for parts of pipeline stages."""
    stages = args_in(content, str(folder)).get("pipeline_model_parallel_size") or 1
    if stages > 1:
        raise InputError(
            f"{folder}: was saved with --pipeline-model-parallel-size {stages}: make it universal "
            "with DeepSpeed's ds_to_universal.py, and import that"
        )


def iteration_of(content: Mapping[str, Any]) -> int:
    """Return the iteration: Megatron's, or DeepSpeed's number of steps."""
    return int(content.get("iteration") or content.get("global_steps") or 0)


def update_counts(optimizer: Mapping[str, Any]) -> list[float]:
    """Return how many updates Adam made as its state says, and its groups."""
    inner = optimizer.get("base_optimizer_state", optimizer.get("optimizer_state_dict", {}))
    groups = optimizer.get("param_groups") or inner.get("param_groups") or []
    places = [*inner.get("state", {}).values(), *groups]
    return [float(place["step"]) for place in places if place.get("step") is not None]


def _load(folder: Path, pattern: re.Pattern[str]) -> Files:
    matches = ((pattern.fullmatch(path.name), path) for path in sorted(folder.iterdir()))
    return {
        (int(match[1] or 0), int(match[2])): load_pickle(path) for match, path in matches if match
    }


def _first(models: Files, folder: Path) -> dict[str, Any]:
    if not models:
        raise InputError(f"{folder}: mp_rank_00_model_states.pt is missing, with the arguments")
    return models[min(models)]


def _require_all(folder: Path, files: Files, data_ranks: int | None, tensor_ranks: int) -> None:
    data_ranks = data_ranks or 1 + max(data for data, _ in files)
    wanted = {(data, rank) for data in range(data_ranks) for rank in range(tensor_ranks)}
    if missing := sorted(wanted - files.keys()):
        names = [f"zero_pp_rank_{data}_mp_rank_{rank:02d}" for data, rank in missing]
        raise InputError(
            f"{folder}: was saved by {data_ranks} data-parallel x {tensor_ranks} tensor ranks, and "
            f"the files of {first_few(names)} are missing; copy those of all ranks"
        )
    if extra := sorted(files.keys() - wanted):
        raise InputError(
            f"{folder}: was saved by {data_ranks} data-parallel x {tensor_ranks} tensor ranks, and "
            f"has files of further ones, {first_few(map(str, extra))}: of another run"
        )


@dataclass(frozen=True)
class _Vector:
    """A flat vector in pieces, none of which is copied before it is read."""

    pieces: Sequence[Tensor]

    def __len__(self) -> int:
        return sum(len(piece) for piece in self.pieces)

    def read(self, start: int, end: int) -> Tensor:
        """Return a part of it."""
        return torch.cat(list(self._overlaps(start, end)) or [torch.empty(0)])

    def _overlaps(self, start: int, end: int) -> Iterator[Tensor]:
        for piece in self.pieces:
            part = piece[max(start, 0) : max(end, 0)]
            start, end = start - len(piece), end - len(piece)
            if len(part):
                yield part


def _parts(models: Files, states: Files, grid: SavedGrid, key: str) -> list[dict[str, LazyTensor]]:
    """Return for each tensor rank the weights, or a moment of them, by megatron-core's names."""
    data_ranks = 1 + max(data for data, _ in states)
    parts = []
    for rank in range(grid.tensor_ranks):
        shapes = models[0, rank]["param_shapes"]
        of_ranks = [states[data, rank]["optimizer_state_dict"] for data in range(data_ranks)]
        read = _stage_3 if STAGE_3 in of_ranks[0] else _stages_1_2
        names = core_names([name for group in shapes for name in group])
        parts.append(
            {
                names[name]: LazyTensor(torch.empty(shape, device="meta"), reader)
                for name, shape, reader in read(shapes, of_ranks, key, grid.where)
            }
        )
    return parts


Reader = tuple[str, torch.Size, Callable[[], Tensor]]


def _stages_1_2(
    shapes: Sequence[Mapping[str, torch.Size]], states: Sequence[Any], key: str, where: str
) -> Iterator[Reader]:
    for number, group in enumerate(shapes):
        vector = _Vector([_groups(state, key, where)[number] for state in states])
        _require_length(sum(shape.numel() for shape in group.values()), vector, 1, where)
        start = 0
        for name, shape in group.items():
            end = start + shape.numel()
            yield name, shape, partial(_read_whole, vector, start, end, shape)
            start = end


def _stage_3(
    shapes: Sequence[Mapping[str, torch.Size]], states: Sequence[Any], key: str, where: str
) -> Iterator[Reader]:
    vectors = [_Vector(_groups(state, key, where)) for state in states]
    all_shapes = {name: shape for group in shapes for name, shape in group.items()}
    lengths = {name: math.ceil(shape.numel() / len(states)) for name, shape in all_shapes.items()}
    for vector in vectors:
        _require_length(sum(lengths.values()), vector, len(shapes), where)
    start = 0
    for name, shape in all_shapes.items():
        end = start + lengths[name]
        yield name, shape, partial(_read_pieces, vectors, start, end, shape)
        start = end


def _read_whole(vector: _Vector, start: int, end: int, shape: torch.Size) -> Tensor:
    return vector.read(start, end).view(shape)


def _read_pieces(vectors: Sequence[_Vector], start: int, end: int, shape: torch.Size) -> Tensor:
    pieces = torch.cat([vector.read(start, end) for vector in vectors])
    return pieces[: shape.numel()].view(shape)


def _groups(state: Mapping[str, Any], key: str, where: str) -> list[Tensor]:
    """Return a rank's flat vectors, one for each group of parameters."""
    if key == WEIGHTS:
        return state[STAGE_3] if STAGE_3 in state else state[STAGES_1_2]
    inner = state.get("base_optimizer_state", state.get("optimizer_state_dict"))
    kept = [*inner["state"].values()] if isinstance(inner, Mapping) else []
    if any(MOMENTUM in each for each in kept):
        raise InputError(f"{where}: has the state of an optimizer, and {NOT_TAKEN}{REMEDY}")
    if not kept or not all(key in each for each in kept):
        raise InputError(f"{where}: its optimizer has no {key}, so it is not Adam{REMEDY}")
    return [inner["state"][number][key] for number in sorted(inner["state"])]


def _require_length(needed: int, vector: _Vector, groups: int, where: str) -> None:
    """Check that a vector has the numbers of its parameters, and no more than padding beside."""
    padding = 1024 * groups * max(1, len(vector.pieces))
    if not needed <= len(vector) <= needed + padding:
        raise InputError(
            f"{where}: the ranks' parts have {len(vector):,} numbers together, but its parameters "
            f"{needed:,}: files of other ranks or of another model are among them"
        )


def _step(content: Mapping[str, Any], folder: Path) -> float:
    steps = update_counts(content["optimizer_state_dict"])
    if not steps:
        raise InputError(f"{folder}: does not say how many updates its optimizer made")
    return steps[0]
