"""The parts of a model that Megatron's tensor and pipeline ranks saved, joined to whole tensors."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from megatron_zpp.interchange.foreign.megatron_args import CAPABILITIES
from megatron_zpp.interchange.foreign.megatron_names import core_name, is_constant, split_dim
from megatron_zpp.interchange.foreign.tensor_files import LazyTensor
from zeropp.errors import InputError, first_few
from zeropp.settings import declared

LAYERS = "decoder.layers."
TIED_COPIES = ("word_embeddings_for_head.", "embedding.word_embeddings_for_head.")
# Of one rank, by megatron-core's names; its layers are numbered from 0.
Parts = Mapping[str, LazyTensor]


@dataclass(frozen=True, kw_only=True)
class SavedGrid:
    """The ranks whose parts make up a model; `where` is what errors call the checkpoint."""

    where: str
    tensor_ranks: int
    is_gated: bool
    is_tied: bool

    @staticmethod
    def of(args: Mapping[str, Any], where: str, tensor_ranks: int | None = None) -> "SavedGrid":
        """Return the ranks by Megatron's arguments, which also say the number if it is None."""
        return SavedGrid(
            where=where,
            tensor_ranks=tensor_ranks or args.get("tensor_model_parallel_size") or 1,
            is_gated=bool(args.get("swiglu") or args.get("geglu")),
            is_tied=not args.get("untie_embeddings_and_output_weights", False),
        )


def flat_tensors(content: Mapping[str, Any], prefix: str = "") -> dict[str, Tensor]:
    """Return the tensors of nested dicts by megatron-core's names, weights only."""
    tensors: dict[str, Tensor] = {}
    for key, value in content.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            tensors |= flat_tensors(value, f"{name}.")
        elif isinstance(value, Tensor):
            core = core_name(name)
            if not is_constant(core) and not core.startswith(TIED_COPIES):
                tensors[core] = value
    return tensors


def join_stages(stages: Sequence[Sequence[Parts]], grid: SavedGrid) -> dict[str, LazyTensor]:
    """Return whole tensors of the parts [stage][tensor rank]; stages are in the model's order.

    Raises InputError for parts that are not of one model.
    """
    whole: dict[str, LazyTensor] = {}
    num_layers = 0
    for parts in stages:
        names = set(parts[0])
        if any(set(part) != names for part in parts):
            odd = sorted({name for part in parts for name in names ^ set(part)})
            raise InputError(
                f"{grid.where}: {first_few(odd)}: not on all tensor-parallel ranks; the files are "
                "not of one checkpoint"
            )
        local = [int(name.split(".")[2]) for name in names if name.startswith(LAYERS)]
        for name in parts[0]:
            if grid.is_tied and name == "output_layer.weight":
                continue  # a copy of the embedding for the last stage
            tensors = [part[name] for part in parts]
            whole[_renumbered(name, num_layers)] = _join(name, tensors, grid)
        num_layers += max(local, default=-1) + 1
    return whole


def joined_by_capability(tensors: Mapping[str, LazyTensor], where: str) -> Mapping[str, LazyTensor]:
    """Join what capabilities have in our GPT as one tensor, by the functions in their `JOINS`."""
    for join in declared("JOINS", CAPABILITIES):
        tensors = join(tensors, where)
    return tensors


def _renumbered(name: str, first: int) -> str:
    if not name.startswith(LAYERS):
        return name
    number, _, rest = name.removeprefix(LAYERS).partition(".")
    return f"{LAYERS}{int(number) + first}.{rest}"


def _join(name: str, parts: list[LazyTensor], grid: SavedGrid) -> LazyTensor:
    """Join what tensor-parallel ranks have of a weight."""
    dim = split_dim(name)
    try:
        if dim is None:
            if len({part.fact.shape for part in parts}) > 1:
                raise ValueError("all ranks should have the same")
            return parts[0]
        if grid.is_gated and ".linear_fc1." in name:  # each rank has a part of both halves
            gates, others = zip(*(part.halves() for part in parts), strict=True)
            return LazyTensor.cat([*gates, *others], 0)
        return LazyTensor.cat(parts, dim)
    except ValueError as error:
        raise InputError(f"{grid.where}: {name} of {len(parts)} ranks: {error}") from error
