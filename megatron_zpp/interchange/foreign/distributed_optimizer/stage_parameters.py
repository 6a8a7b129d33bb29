"""Which parameters the ranks of a pipeline have, in the order in which megatron-core defines them.

Checkpoints that are not split by rank do not say it: neither the order, which differs between
Transformer Engine's layers and megatron-core's own, nor which layers a stage has.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from megatron_zpp.interchange.foreign.megatron_names import split_dim, table
from megatron_zpp.interchange.foreign.rank_parts import LAYERS, SavedGrid
from megatron_zpp.interchange.foreign.tensor_files import LazyTensor, UnmappedStateError
from zeropp.errors import InputError, first_few

EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"
_BEFORE = ("embedding.word_embeddings", "embedding.position_embeddings")
_BEHIND = ("decoder.final_layernorm", "output_layer")
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class RankParameters:
    """What one rank has of a model chunk: shapes in the order of definition, by local names.

    Layers are numbered from 0. `own_bucket` are weights that the first and last stage share.
    """

    shapes: Mapping[str, torch.Size]
    own_bucket: frozenset[str] = frozenset()

    def numels(self) -> dict[str, int]:
        """Return the number of numbers of each parameter."""
        return {name: shape.numel() for name, shape in self.shapes.items()}


def shared_weights(grid: SavedGrid, stages: int) -> frozenset[str]:
    """Return the weights that the first and the last pipeline stage share."""
    return frozenset({EMBEDDING, OUTPUT} if grid.is_tied and stages > 1 else ())


def orders(args: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Return the orders of a layer's modules, that of the arguments first."""
    first = args.get("transformer_impl", "transformer_engine")
    orders = table()["orders"]
    return [tuple(orders[name]) for name in sorted(orders, key=lambda name: name != first)]


@dataclass(frozen=True, kw_only=True)
class ModelChunks:
    """A model's parameters on the ranks of its pipeline, a position for each stage of each chunk.

    Positions are in the order of the model's layers.
    """

    shapes: Mapping[str, torch.Size]  # of one tensor rank, by megatron-core's names
    positions: int
    shared: frozenset[str]

    @staticmethod
    def of(
        weights: Mapping[str, LazyTensor], grid: SavedGrid, stages: int, chunks: int
    ) -> "ModelChunks":
        """Return those of a model with these weights, whole.

        Raises UnmappedStateError for weights whose place is not known, and InputError if their
        shapes cannot be split.
        """
        shapes = {name: _rank_shape(name, each, grid) for name, each in weights.items()}
        if grid.is_tied:
            shapes.pop(OUTPUT, None)
            if stages > 1:
                shapes[OUTPUT] = shapes[EMBEDDING]
        modules = {*_BEFORE, *_BEHIND, *table()["orders"]["local"]}
        unplaced = [name for name in shapes if _module(name) not in modules]
        if unplaced:
            raise UnmappedStateError(
                f"it is not known where {first_few(unplaced)} lies in the distributed optimizer's "
                "buckets"
            )
        shared = shared_weights(grid, stages)
        return ModelChunks(shapes=shapes, positions=stages * chunks, shared=shared)

    def split(
        self, order: Sequence[str], fit: Callable[[int, RankParameters], T | None]
    ) -> list[T] | None:
        """Return what `fit` returns for the parameters of each position; None if none fit.

        `fit` returns None for parameters that a position does not have.
        """
        layers = 1 + max(int(name.split(".")[2]) for name in self.shapes if LAYERS in name)
        first, results = 0, []
        for position in range(self.positions):
            for parameters, end in self._candidates(position, first, layers, order):
                result = fit(position, parameters)
                if result is not None:
                    results.append(result)
                    first = end
                    break
            else:
                return None
        return results

    def _candidates(
        self, position: int, first: int, layers: int, order: Sequence[str]
    ) -> Iterator[tuple[RankParameters, int]]:
        """Yield what a position can have from layer `first` on, and the layer behind that."""
        is_last = position == self.positions - 1
        for end in [layers] if is_last else range(first, layers + 1):
            modules = [
                *(_BEFORE if position == 0 else ()),
                *(f"{LAYERS}{layer}.{module}" for layer in range(first, end) for module in order),
                *(_BEHIND if is_last else ()),
            ]
            names = [f"{module}.{kind}" for module in modules for kind in ("weight", "bias")]
            shapes = {
                _local(name, first): self.shapes[name] for name in names if name in self.shapes
            }
            yield RankParameters(shapes=shapes, own_bucket=self.shared), end


def _rank_shape(name: str, weight: LazyTensor, grid: SavedGrid) -> torch.Size:
    shape, dim = list(weight.fact.shape), split_dim(name)
    if dim is not None:
        if shape[dim] % grid.tensor_ranks:
            raise InputError(
                f"{grid.where}: {name} of shape {shape} cannot be split for the "
                f"{grid.tensor_ranks} tensor ranks that its arguments name"
            )
        shape[dim] //= grid.tensor_ranks
    return torch.Size(shape)


def _module(name: str) -> str:
    if name.startswith(LAYERS):
        name = name.removeprefix(LAYERS).partition(".")[2]
    return name.rpartition(".")[0]


def _local(name: str, first: int) -> str:
    if not name.startswith(LAYERS):
        return name
    number, _, rest = name.removeprefix(LAYERS).partition(".")
    return f"{LAYERS}{int(number) - first}.{rest}"
