"""A model on the meta device, and the parts of it that the ranks of a planned run have."""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import nn

from megatron_zpp.model.block import Block
from megatron_zpp.model.gpt import GPT
from megatron_zpp.model.moe.experts import Experts
from megatron_zpp.model.part import Part, parts_of_stages
from megatron_zpp.model.tensor_parallel import partial_parameters
from megatron_zpp.planner.parts.planned_optimizer import PlannedOptimizer
from megatron_zpp.planner.parts.planned_ranks import PlannedRanks
from megatron_zpp.settings.config import Config
from zeropp.sharding.cut import places_of, sharded_parameters, trained_subunits

META = torch.device("meta")
Subunits = tuple[tuple[nn.Parameter, ...], ...]


class MetaUnit(NamedTuple):
    """The parameters of each subunit of a unit.

    layer: that of a block, None for a root. is_experts: it is the experts of the block before it,
    which ranks split. shapes: of each parameter its shape, and whether it is trained.
    """

    layer: int | None
    is_experts: bool
    subunits: Subunits
    shapes: tuple = ()

    def with_shapes(self) -> "MetaUnit":
        """Return the unit with the shapes of its parameters."""
        shapes = (tuple((p.shape, p.requires_grad) for p in each) for each in self.subunits)
        return self._replace(shapes=tuple(shapes))


class MetaModel:
    """The model of `config`, whole, and split as runs of different sizes split it.

    What is built once is kept: a plan compares many runs of one model.
    """

    def __init__(self, config: Config, vocab_size: int) -> None:
        self._config, self._vocab_size = config, vocab_size
        self._adapted = Part(lora=config.lora if config.lora.lora_rank else None)
        self.whole = self._build(GPT, self._adapted)
        self._split: dict[tuple, GPT] = {}
        self._ends: dict[tuple, GPT] = {}
        self._units: dict[tuple, tuple[MetaUnit, ...]] = {}
        self._partial: dict[tuple, tuple[nn.Parameter, ...]] = {}
        self._optimizers: dict[tuple, PlannedOptimizer] = {}

    def stages(self, ranks: PlannedRanks) -> list[Part]:
        """Return the stages of a rank."""
        layers = ranks.parallel.stages(self._config.model.num_layers)
        part = replace(self._adapted, experts=ranks.split_experts)
        return parts_of_stages(part, layers, ranks.pipeline_place, ranks.pipeline_size)

    def split(self, ranks: PlannedRanks) -> GPT:
        """Return all layers, with a rank's parts of their matrices."""
        key = _axes_key(ranks)
        if key not in self._split:
            is_whole = ranks.tensor_size == ranks.context_size == ranks.expert_ranks == 1
            self._split[key] = self.whole if is_whole else self._build(GPT, self._adapted, ranks)
        return self._split[key]

    def ends(self, ranks: PlannedRanks, stage: Part) -> GPT:
        """Return what a stage has beside its blocks, which one stands for that does nothing."""
        key = _axes_key(ranks), stage.is_first, stage.is_last
        if key not in self._ends:
            part = Part(layers=range(1), is_first=stage.is_first, is_last=stage.is_last)
            model = self._build(Ends, part, ranks)
            model.requires_grad_(self.whole.tokens.weight.requires_grad)
            self._ends[key] = model
        return self._ends[key]

    def units(
        self,
        ranks: PlannedRanks,
        stage: Part,
        *,
        separates_trained: bool,
        separates_experts: bool,
    ) -> tuple[MetaUnit, ...]:
        """Return each block of a stage, with its experts if ranks split them, and then its root.

        The units are those of `zeropp.shard`. With `separates_trained`, trained adapters are a
        subunit of their own; with `separates_experts`, those of experts that ranks split.
        """
        model, has_end = self.split(ranks), (stage.is_first, stage.is_last)
        separates = separates_trained, separates_experts
        key = _axes_key(ranks), stage.layers, has_end, separates
        if key not in self._units:
            root = MetaUnit(None, False, self._root(ranks, stage, separates_trained))
            units = [
                unit
                for layer in stage.layers
                for unit in self._units_of_block(model.blocks[layer], layer, ranks, separates)
            ]
            self._units[key] = (*units, root.with_shapes())
        return self._units[key]

    def _units_of_block(
        self, block: nn.Module, layer: int, ranks: PlannedRanks, separates: tuple[bool, bool]
    ) -> tuple[MetaUnit, ...]:
        key = _axes_key(ranks), layer, separates
        if key not in self._units:
            units = _block_units(block, layer, ranks, *separates)
            self._units[key] = tuple(unit.with_shapes() for unit in units)
        return self._units[key]

    def partial(self, ranks: PlannedRanks) -> tuple[nn.Parameter, ...]:
        """Return the parameters of whose gradients each tensor rank computes a term."""
        key = _axes_key(ranks)
        if key not in self._partial:
            splits_rows = ranks.parallel.sequence_parallel
            self._partial[key] = tuple(partial_parameters(self.split(ranks), splits_rows))
        return self._partial[key]

    def optimizer(
        self,
        kind: type[PlannedOptimizer],
        config: Config,
        ranks: PlannedRanks,
        stages: Sequence[Part],
        *,
        is_sharded: bool,
    ) -> PlannedOptimizer:
        """Return the optimizer of a rank's stages, of a `config` with other ZeRO settings."""
        layers = tuple(stage.layers for stage in stages)
        nodes = ranks.data_nodes, ranks.expert_nodes, is_sharded
        key = kind, _axes_key(ranks), layers, nodes, kind.key(config)
        if key not in self._optimizers:
            model = self.split(ranks)
            self._optimizers[key] = kind(config, model, ranks, stages, is_sharded=is_sharded)
        return self._optimizers[key]

    def _root(self, ranks: PlannedRanks, stage: Part, separates_trained: bool) -> Subunits:
        """Return the parameters of each subunit of a stage's root."""
        ends = self.ends(ranks, stage)
        own = {
            name: child
            for name, child in self.split(ranks).named_children()
            if name != "blocks" and getattr(ends, name) is not None
        }
        subunits = list(_subunits(nn.ModuleDict(own), (), separates_trained))
        subunits.reverse()  # the adapters of the root come first
        return tuple(subunits) or ((),)

    def _build(self, kind: type[GPT], part: Part, ranks: PlannedRanks | None = None) -> GPT:
        if ranks is not None:
            parallel = ranks.parallel
            tensor, context = ranks.tensor_axis(parallel), ranks.context_axis(parallel)
            part = replace(part, tensor=tensor, context=context, experts=ranks.split_experts)
        with META:
            return kind(self._config.model, self._vocab_size, part)


class PassingBlock(Block):
    """A block that does nothing."""

    def forward(self, x: torch.Tensor, *_: object) -> torch.Tensor:
        """Return x."""
        return x


class Ends(GPT):
    """What a stage has beside its blocks, for which one stands that does nothing."""

    block_class = PassingBlock


def largest_block(
    model: GPT, *, has_experts: bool, attention_dropout: float, selective: bool
) -> Block:
    """Return a copy of the block with the most trained weights, which is run in another way.

    It is one of those that have experts, or of those that have none.
    """
    alike = (
        block
        for block, marked in zip(model.blocks, model.config.moe_layers, strict=True)
        if marked == has_experts
    )
    block = copy.deepcopy(max(alike, key=_num_trained))
    block.attention.dropout = attention_dropout
    block.attention.is_recomputed = selective
    return block


def _num_trained(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)


def _axes_key(ranks: PlannedRanks) -> tuple:
    """Return what the parts that a rank has of a layer, and its activations, depend on."""
    parallel = ranks.parallel
    return (
        ranks.tensor_size,
        ranks.context_size,
        ranks.tensor_size > 1 and parallel.sequence_parallel,
        parallel.cp_comm_type,
        ranks.expert_ranks,
    )


def _block_units(
    block: nn.Module,
    layer: int,
    ranks: PlannedRanks,
    separates_trained: bool,
    separates_experts: bool,
) -> Iterator[MetaUnit]:
    """Yield a block, and its experts if ranks split them."""
    experts = [each for each in block.modules() if isinstance(each, Experts)]
    apart = experts if ranks.expert_ranks > 1 else []
    yield MetaUnit(layer, False, _subunits(block, apart, separates_trained))
    for module in apart:
        yield MetaUnit(layer, True, _subunits(module, (), separates_experts))


def _subunits(unit: nn.Module, others: Sequence[nn.Module], separates_trained: bool) -> Subunits:
    """Return the own parameters of a unit and those of its adapters, without empty lists.

    Modules in `others` do not belong to the unit.
    """
    places = [place for place in places_of(unit, others) if place.unit is unit]
    parameters = sharded_parameters(places)
    adapters = trained_subunits(unit, places) if separates_trained else {}
    adapter_parameters = set().union(*adapters.values())
    own = tuple(parameter for parameter in parameters if parameter not in adapter_parameters)
    adapter = tuple(parameter for parameter in parameters if parameter in adapter_parameters)
    return tuple(subunit for subunit in (own, adapter) if subunit)
