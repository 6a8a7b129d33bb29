"""The distributed optimizer's state of all ranks of a model, joined to whole tensors."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from megatron_zpp.interchange.foreign.distributed_optimizer.bucket_tensors import (
    PREFIX,
    BucketTensors,
    object_name,
)
from megatron_zpp.interchange.foreign.distributed_optimizer.gathered_state import (
    KEYS,
    ByKey,
    GatheredState,
)
from megatron_zpp.interchange.foreign.distributed_optimizer.stage_parameters import (
    ModelChunks,
    RankParameters,
    orders,
)
from megatron_zpp.interchange.foreign.rank_parts import SavedGrid, join_stages
from megatron_zpp.interchange.foreign.shard_tensors import ShardTensors
from megatron_zpp.interchange.foreign.tensor_files import REMEDY, LazyTensor, UnmappedStateError
from zeropp.errors import InputError, first_few

# Megatron's bucket: so many parameters, or so many for each data-parallel rank if that is more.
_BUCKET, _BUCKET_OF_RANK = 40_000_000, 1_000_000


class RankState(Protocol):
    """The state of one tensor rank of a pipeline stage."""

    @property
    def chunks(self) -> int:
        """The number of the model's chunks on the rank."""

    def parts(
        self, chunk: int, parameters: RankParameters, bucket_size: int | None
    ) -> ByKey | None:
        """Return the parameters' tensors; None if the state is not of these parameters."""


@dataclass(frozen=True, kw_only=True)
class RankStates:
    """The states of all ranks, [stage][tensor rank], and Megatron's arguments."""

    states: Sequence[Sequence[RankState]]
    grid: SavedGrid
    args: Mapping[str, Any]

    @property
    def chunks(self) -> int:
        """The number of the model's chunks; raises InputError if ranks have different ones."""
        numbers = sorted({state.chunks for ranks in self.states for state in ranks})
        if len(numbers) > 1:
            counts = first_few(list(map(str, numbers)))
            raise InputError(
                f"{self.grid.where}: the distributed optimizer has {counts} model chunks on its "
                f"ranks: mixed up{REMEDY}"
            )
        return numbers[0]

    def parts(
        self, position: int, parameters: Callable[[int], RankParameters]
    ) -> list[ByKey | None]:
        """Return for each tensor rank the tensors of its parameters, None if they do not fit.

        Positions are the stages of the first chunk, then those of the second, and so on.
        """
        chunk, stage = divmod(position, len(self.states))
        bucket_size = self._bucket_size(stage, chunk)
        return [
            state.parts(chunk, parameters(rank), bucket_size)
            for rank, state in enumerate(self.states[stage])
        ]

    def join(self, positions: Sequence[Sequence[ByKey]]) -> ByKey:
        """Return whole tensors of what `parts` returned for all positions."""
        return {
            key: join_stages([[part[key] for part in ranks] for ranks in positions], self.grid)
            for key in KEYS
        }

    def _bucket_size(self, stage: int, chunk: int) -> int | None:
        """Return how large Megatron made the buckets; None: it made a single one."""
        if not self.args.get("overlap_grad_reduce") or stage or chunk:
            return None
        sizes = [self.args.get(f"{axis}_parallel_size") or 1 for axis in ("data", "context")]
        default = max(_BUCKET, _BUCKET_OF_RANK * sizes[0] * sizes[1])
        return self.args.get("ddp_bucket_size") or default


def has_rank_states(tensors: ShardTensors) -> bool:
    """Whether a torch_dist checkpoint has the distributed optimizer's state by ranks."""
    return any(PREFIX in name for name in tensors.names())


def read_rank_states(
    tensors: ShardTensors,
    weights: Mapping[str, LazyTensor],
    args: Mapping[str, Any],
    grid: SavedGrid,
) -> ByKey:
    """Return the state in a torch_dist checkpoint, of weights that are whole.

    Raises InputError if it is incomplete or does not fit the weights, UnmappedStateError if it is
    of a kind that does not say which numbers belong to which weight.
    """
    states = _states(tensors, args, grid)
    stages = len(states.states)
    chunks = ModelChunks.of(weights, grid, stages, states.chunks)

    def fit(position: int, parameters: RankParameters) -> list[ByKey] | None:
        parts = states.parts(position, lambda _: parameters)
        return None if None in parts else parts

    for order in orders(args):
        positions = chunks.split(order, fit)
        if positions is not None:
            return states.join(positions)
    raise InputError(
        f"{grid.where}: the buckets of the distributed optimizer are not those of the model's "
        f"parameters on {grid.tensor_ranks} tensor ranks x {stages} pipeline stages: files of "
        f"another checkpoint are among them, or it is of a very old or new version{REMEDY}"
    )


def updates(tensors: ShardTensors) -> float | None:
    """Return how many updates Adam made, None if it is not said.

    Raises InputError if the ranks say different numbers.
    """
    names = [name for name in tensors.names() if name.startswith(PREFIX)]
    groups = [
        group
        for name in names
        if name.endswith(".optimizer/shard_0_1")
        for group in tensors.pickled(name)["param_groups"]
    ]
    steps = sorted({float(group["step"]) for group in groups if group.get("step") is not None})
    if len(steps) > 1:
        raise InputError(
            f"{tensors.folder}: its ranks made {first_few(list(map(str, steps)))} updates: mixed up"
        )
    return steps[0] if steps else None


def _states(tensors: ShardTensors, args: Mapping[str, Any], grid: SavedGrid) -> RankStates:
    if any(name.startswith("chained_") for name in tensors.names()):
        raise UnmappedStateError("it is that of several optimizers")
    stages = args.get("pipeline_model_parallel_size") or 1
    number = grid.tensor_ranks * stages
    by_rank: dict[int, RankState] = dict(BucketTensors.by_rank(tensors))
    for rank in range(number):
        name = object_name(rank, "param_state")
        if name in tensors.names():
            where = f"{tensors.folder}: {name}"
            by_rank[rank] = GatheredState.of(tensors.pickled(name), where)
    if by_rank.keys() != set(range(number)):
        raise InputError(
            f"{tensors.folder}: was saved by {grid.tensor_ranks} tensor ranks x {stages} pipeline "
            f"stages, but has the distributed optimizer's state of {len(by_rank)}{REMEDY}"
        )
    states = [
        [by_rank[rank + grid.tensor_ranks * stage] for rank in range(grid.tensor_ranks)]
        for stage in range(stages)
    ]
    return RankStates(states=states, grid=grid, args=args)
