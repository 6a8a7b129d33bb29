"""A model on the meta device, and the parts of it that the ranks of a planned run have."""

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, TypeVar

import torch
from torch import nn

from megatron_zpp.model.gpt import GPT, Block
from megatron_zpp.model.mlp import FeedForward
from megatron_zpp.model.part import WHOLE, Part, parts_of_stages
from megatron_zpp.model.tensor_parallel import partial_parameters
from megatron_zpp.planner.parts.planned_ranks import PlannedRanks
from megatron_zpp.recipe.capability import Capability, extended
from megatron_zpp.settings.config import ModelConfig

META = torch.device("meta")
Kept = TypeVar("Kept")


class MetaModel:
    """The model of a run, whole, and split as runs of different sizes split it.

    What is built once is kept: a plan compares many runs of one model.
    """

    def __init__(
        self, shape: ModelConfig, vocab_size: int, capabilities: Sequence[Capability] = ()
    ) -> None:
        self._shape, self.vocab_size, self._capabilities = shape, vocab_size, capabilities
        self.whole = self._build(GPT, WHOLE)
        self._kept: dict[tuple, Any] = {}

    @cached_property
    def num_parameters(self) -> int:
        """How many parameters the whole model has."""
        return self.whole.num_parameters()

    def once(self, make: Callable[[], Kept], *key: object) -> Kept:
        """Return what `make` returned when it was first asked for the same key."""
        if key not in self._kept:
            self._kept[key] = make()
        return self._kept[key]

    def layer_kinds(self, group: int) -> tuple[tuple[object, ...], ...]:
        """Return, for each layer, what its time and memory depend on.

        That is also its place among the `group` layers that are recomputed at once.
        """
        config, blocks = self.whole.config, self.whole.blocks

        def kinds() -> tuple[tuple[object, ...], ...]:
            layers = zip(blocks, config.windows, config.layers_without_rope, strict=True)
            return tuple(
                (type(block.mlp), *others, layer % group)
                for layer, (block, *others) in enumerate(layers)
            )

        return self.once(kinds, "kinds", group)

    def stages(self, ranks: PlannedRanks) -> list[Part]:
        """Return the stages of a rank."""
        layers = ranks.parallel.stages(self._shape.num_layers)
        part = replace(WHOLE, axes=ranks.axes)
        return parts_of_stages(part, layers, ranks.pipeline_rank, ranks.pipeline_size)

    def split(self, ranks: PlannedRanks) -> GPT:
        """Return all layers, with a rank's parts of their matrices."""
        if ranks.tensor_size == ranks.context_size == ranks.inner_size == 1:
            return self.whole
        return self.once(lambda: self._build(GPT, WHOLE, ranks), "all", axes_key(ranks))

    def ends(self, ranks: PlannedRanks, stage: Part) -> GPT:
        """Return what a stage has beside its blocks, which one stands for that does nothing."""
        part = Part(layers=range(1), is_first=stage.is_first, is_last=stage.is_last)
        trains = self.whole.tokens.weight.requires_grad
        return self.once(
            lambda: self._build(Ends, part, ranks).requires_grad_(trains),
            (axes_key(ranks), stage.is_first, stage.is_last),
        )

    def root(self, ranks: PlannedRanks, stage: Part) -> nn.Module:
        """Return a module of what a stage has beside its blocks, with a rank's parts of it."""
        ends = self.ends(ranks, stage)
        return nn.ModuleDict(
            {
                name: child
                for name, child in self.split(ranks).named_children()
                if name != "blocks" and getattr(ends, name) is not None
            }
        )

    def alike(self, ranks: PlannedRanks) -> tuple[int, ...]:
        """Return for each layer the first one that has parameters of the same names and shapes."""
        blocks = self.split(ranks).blocks

        def firsts() -> tuple[int, ...]:
            found: dict[tuple, int] = {}
            return tuple(found.setdefault(_shapes(each), i) for i, each in enumerate(blocks))

        return self.once(firsts, "alike", axes_key(ranks))

    def parameters(self, ranks: PlannedRanks) -> tuple[tuple[int | None, nn.Parameter], ...]:
        """Return each parameter in order, as its layer, if any, and its like in the first alike."""
        alike = self.alike(ranks)

        def found() -> Iterator[tuple[int | None, nn.Parameter]]:
            named = dict(self.split(ranks).named_parameters())
            for name, parameter in named.items():
                if name.startswith("blocks."):
                    _, layer, inside = name.split(".", 2)
                    yield int(layer), named[f"blocks.{alike[int(layer)]}.{inside}"]
                else:
                    yield None, parameter

        return self.once(lambda: tuple(found()), "parameters", axes_key(ranks))

    def partial(self, ranks: PlannedRanks) -> frozenset[nn.Parameter]:
        """Return the parameters of whose gradients each tensor rank computes a term."""
        found = partial(frozenset, partial_parameters(self.split(ranks)))
        return self.once(found, "partial", axes_key(ranks))

    def _build(self, kind: type[GPT], part: Part, ranks: PlannedRanks | None = None) -> GPT:
        if ranks is not None:
            part = replace(part, axes=ranks.axes).over(ranks, ranks.parallel)
        with META:
            model = kind(self._shape, self.vocab_size, part)
            return extended(model, self._capabilities) if kind is GPT else model


class PassingBlock(Block):
    """A block that does nothing."""

    def forward(self, x: torch.Tensor, *_: object) -> torch.Tensor:
        """Return x."""
        return x


class Ends(GPT):
    """What a stage has beside its blocks, for which one stands that does nothing."""

    block_class = PassingBlock


def largest_block(
    model: GPT, kind: type[FeedForward], *, attention_dropout: float, selective: bool
) -> Block:
    """Return a copy of the block with the most trained weights, which is run in another way.

    It is one of those whose second branch is of a kind.
    """
    alike = (block for block in model.blocks if type(block.mlp) is kind)
    block = copy.deepcopy(max(alike, key=_num_trained))
    block.attention.dropout = attention_dropout
    block.attention.is_recomputed = selective
    return block


def _num_trained(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)


def own_axes(model: nn.Module) -> dict[nn.Module, Any]:
    """Return the modules that have `own_axis`: of ranks that split and shard their parameters."""
    axes = ((module, getattr(module, "own_axis", None)) for module in model.modules())
    return {module: axis for module, axis in axes if axis is not None}


def axes_key(ranks: PlannedRanks) -> tuple:
    """Return what the parts that a rank has of a layer, and its activations, depend on."""
    parallel = ranks.parallel
    return (
        ranks.tensor_size,
        ranks.context_size,
        ranks.tensor_size > 1 and parallel.sequence_parallel,
        parallel.cp_comm_type,
        ranks.inner_size,
    )


def _shapes(block: Block) -> tuple:
    """Return the name and the shape of each parameter, and whether it is trained."""
    return tuple((name, p.shape, p.requires_grad) for name, p in block.named_parameters())
