"""What a rank's GPT is made of, and how it runs its blocks.

Blocks run directly, compiled, or with activations that backward recomputes. Both happen inside the
blocks, so that the hooks that sharding puts on a block stay outside. Recomputation replays the
random numbers of dropout: losses and gradients are bitwise equal to those without it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatron_zpp.model.loss import CrossEntropy, logits_to_gradient, whole_cross_entropy
from megatron_zpp.parallel.mesh import RankGrid
from megatron_zpp.settings.config import ParallelConfig, RecomputeConfig
from zeropp.wire import RankGroup

Backend = str | Callable
NO_RECOMPUTATION = RecomputeConfig()


@dataclass(frozen=True, kw_only=True)
class NormClasses:
    """The classes of normalizations whose weights are gains; called with a size and `eps`."""

    layer_norm: type[nn.Module] = nn.LayerNorm
    rms_norm: type[nn.Module] = nn.RMSNorm


TORCH_NORMS = NormClasses()


class Execution:
    """How the blocks of one model, and its cross-entropy, are run.

    Full recomputation stores only inputs: with the uniform method, of each group of
    `recompute_num_layers` blocks; with the block method, of each of the first
    `recompute_num_layers` blocks, while the others store everything. Selective recomputation
    discards the activations of the core attention. With a `backend` torch.compile compiles the
    computation of a block, whose code blocks of one shape share, in the first forward pass.
    `cross_entropy` is None for the usual one.
    """

    def __init__(
        self,
        recompute: RecomputeConfig = NO_RECOMPUTATION,
        backend: Backend | None = None,
        cross_entropy: CrossEntropy | None = None,
    ) -> None:
        is_full = recompute.recompute_granularity == "full"
        size = recompute.recompute_num_layers
        is_block_method = recompute.recompute_method == "block"
        self.group_size = size if is_full and not is_block_method and size > 1 else None
        self.recomputes_attention = recompute.recompute_granularity == "selective"
        self._recomputes_blocks = is_full and self.group_size is None
        self._num_recomputed = size if is_block_method else None
        self._compile = None if backend is None else cache(partial(torch.compile, backend=backend))
        self.cross_entropy = cross_entropy
        if backend is not None:
            self.cross_entropy = partial(
                whole_cross_entropy, kernel=torch.compile(logits_to_gradient, backend=backend)
            )

    def recomputed(self, layers: range) -> range:
        """Return those of a stage's layers whose blocks are recomputed, each by itself."""
        return layers[: self._num_recomputed] if self._recomputes_blocks else layers[:0]

    def groups(self, layers: range) -> tuple[tuple[int, ...], ...]:
        """Return the layers of a stage in the groups that are run at once."""
        if self.group_size is None:
            return (tuple(layers),)
        size = self.group_size
        return tuple(tuple(each) for _, each in groupby(layers, key=lambda layer: layer // size))

    def checkpoints(self, layers: range) -> list[tuple[int, ...]]:
        """Return those of a stage's layers that backward computes again, in groups as it does."""
        if self.group_size is None:
            return [(layer,) for layer in self.recomputed(layers)]
        return list(self.groups(layers))

    def run_group(self, run: Callable[..., Tensor], *arguments: object) -> Tensor:
        """Return `run(*arguments)` for a group of blocks."""
        return run(*arguments) if self.group_size is None else recomputed(run, *arguments)

    def run_block(
        self, compute: Callable[..., Tensor], *arguments: object, recompute: bool
    ) -> Tensor:
        """Return `compute(*arguments)` for a block."""
        if self._compile is not None:
            compute = self._compile(compute)
        return recomputed(compute, *arguments) if recompute else compute(*arguments)


@dataclass(frozen=True, kw_only=True)
class Part:
    """The part of a GPT that a rank has, and how it computes it; by default the whole, alone.

    layers: its blocks, None for all. is_first: it has the embedding. is_last: it has the output
    layer. tensor: the ranks that each have a part of its matrices. context: those that each have a
    part of each sequence. axes: those of capabilities, by their names; None for one over which
    nothing is split. splits_rows: between split layers each tensor rank has some rows (sequence
    parallelism). gathers_keys: attention gathers keys and values from the context ranks, instead of
    exchanging heads for rows.
    """

    layers: range | None = None
    is_first: bool = True
    is_last: bool = True
    tensor: RankGroup | None = None
    context: RankGroup | None = None
    axes: Mapping[str, Any] = field(default_factory=dict, hash=False)
    execution: Execution = field(default_factory=Execution)
    norms: NormClasses = TORCH_NORMS
    splits_rows: bool = False
    gathers_keys: bool = False

    def over(self, ranks: RankGrid, parallel: ParallelConfig) -> "Part":
        """Return this part split over ranks that share matrices or sequences."""
        return replace(
            self,
            tensor=ranks.tensor_group if ranks.tensor_size > 1 else None,
            context=ranks.context_group if ranks.context_size > 1 else None,
            splits_rows=ranks.tensor_size > 1 and parallel.sequence_parallel,
            gathers_keys=ranks.context_size > 1 and parallel.cp_comm_type == "allgather",
        )


WHOLE = Part()


def parts_of_stages(
    common: Part, stages: Sequence[range], place: int = 0, size: int = 1
) -> list[Part]:
    """Return the parts of a rank's stages: those numbered `place`, `place` + `size` and so on.

    `stages` are the layers of all of them, and `common` has the other fields.
    """
    last = len(stages) - 1
    return [
        replace(common, layers=stages[index], is_first=index == 0, is_last=index == last)
        for index in range(place, len(stages), size)
    ]


def recomputed(function: Callable[..., Tensor], *arguments: object) -> Tensor:
    """Return `function(*arguments)`; its intermediate results are recomputed for backward."""
    return checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=True)
