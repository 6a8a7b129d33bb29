"""A model on the meta device, and the parts of it that the ranks of a planned run have."""

import copy
from collections.abc import Collection
from dataclasses import replace

import torch
from torch import nn

from megatron_zpp.model.gpt import GPT
from megatron_zpp.model.lora import add_lora
from megatron_zpp.model.recompute import call_checkpointed
from megatron_zpp.parallel.context_parallel import split_sequences
from megatron_zpp.parallel.pipeline_stage import Stage
from megatron_zpp.parallel.tensor_parallel import TensorAxis, keep_parts, partial_parameters
from megatron_zpp.planner.parts.planned_ranks import PlannedRanks
from megatron_zpp.settings.config import Config
from zeropp.sharding.cut import own_parameters, trained_subunits

META = torch.device("meta")
Units = tuple[tuple[tuple[nn.Parameter, ...], ...], ...]  # parameters of subunits of units


class MetaModel:
    """The model of `config`, whole, and split as runs of different sizes split it.

    What is built once is kept: a plan compares many runs of one model.
    """

    def __init__(self, config: Config, vocab_size: int) -> None:
        self._config, self._vocab_size = config, vocab_size
        self.whole = self._build(config.model.num_layers)
        self._split: dict[tuple, GPT] = {}
        self._ends: dict[tuple, GPT] = {}
        self._units: dict[tuple, Units] = {}
        self._partial: dict[tuple, tuple[nn.Parameter, ...]] = {}

    def stages(self, ranks: PlannedRanks) -> list[Stage]:
        """Return the stages of a rank; their models have the blocks of all stages."""
        layers = ranks.parallel.stages(self._config.model.num_layers)
        return [
            Stage(index=index, count=len(layers), layers=layers[index], model=self.split(ranks))
            for index in range(ranks.pipeline_place, len(layers), ranks.pipeline_size)
        ]

    def split(self, ranks: PlannedRanks) -> GPT:
        """Return all layers, with a rank's parts of their matrices."""
        key = _axes_key(ranks)
        if key not in self._split:
            is_whole = ranks.tensor_size == ranks.context_size == 1
            self._split[key] = (
                self.whole if is_whole else self._build(self._config.model.num_layers, ranks)
            )
        return self._split[key]

    def ends(self, ranks: PlannedRanks, stage: Stage) -> GPT:
        """Return what a stage has beside its blocks, which one stands for that does nothing."""
        key = _axes_key(ranks), stage.is_first, stage.is_last
        if key not in self._ends:
            model = self._build(1, ranks)
            model.requires_grad_(self.whole.tokens.weight.requires_grad)
            model.blocks[0].forward = lambda x, *_: x
            if stage.count > 1:
                last = range(1) if stage.is_first else range(0)
                Stage(index=stage.index, count=stage.count, layers=last, model=model).cut()
            self._ends[key] = model
        return self._ends[key]

    def units(self, ranks: PlannedRanks, stage: Stage, *, stores_frozen: bool) -> Units:
        """Return the parameters of each subunit of each block of a stage, and then of its root.

        The units are those of `zeropp.shard`. If frozen weights are stored as codes, trained
        adapters are a subunit of their own.
        """
        model, has_end = self.split(ranks), (stage.is_first, stage.is_last)
        key = _axes_key(ranks), stage.layers, has_end, stores_frozen
        if key not in self._units:
            blocks = [_subunits(model.blocks[layer], (), stores_frozen) for layer in stage.layers]
            self._units[key] = (*blocks, self._root(ranks, stage, stores_frozen))
        return self._units[key]

    def partial(self, ranks: PlannedRanks) -> tuple[nn.Parameter, ...]:
        """Return the parameters of whose gradients each tensor rank computes a term."""
        key = _axes_key(ranks)
        if key not in self._partial:
            splits_rows = ranks.parallel.sequence_parallel
            self._partial[key] = tuple(partial_parameters(self.split(ranks), splits_rows))
        return self._partial[key]

    def _root(
        self, ranks: PlannedRanks, stage: Stage, stores_frozen: bool
    ) -> tuple[tuple[nn.Parameter, ...], ...]:
        """Return the parameters of each subunit of a stage's root."""
        model, ends = self.split(ranks), self.ends(ranks, stage)
        elsewhere = {
            module
            for name, child in model.named_children()
            if name == "blocks" or getattr(ends, name) is None
            for module in child.modules()
        }
        subunits = list(_subunits(model, elsewhere, stores_frozen))
        subunits.reverse()  # the adapters of the root come first
        return tuple(subunits) or ((),)

    def _build(self, num_layers: int, ranks: PlannedRanks | None = None) -> GPT:
        config = self._config
        with META:
            model = GPT(replace(config.model, num_layers=num_layers), self._vocab_size)
            if config.lora.lora_rank and num_layers == config.model.num_layers:
                add_lora(model, config.lora)
        if ranks is not None and ranks.tensor_size > 1:
            axis = TensorAxis(ranks.tensor_peers, ranks.parallel.sequence_parallel)
            axis.splits_rows = axis.sequence_parallel  # as in a pass that computes a loss
            keep_parts(model, axis)
        if ranks is not None and ranks.context_size > 1:
            communication = ranks.parallel.cp_comm_type
            split_sequences(model, ranks.context_peers, communication).splits = True
        return model


class LargestBlock(nn.Module):
    """A copy of the block of a model with the most trained weights.

    Hooks on the block are not called: those of the first one divide what arrives among ranks.
    """

    def __init__(self, model: GPT, *, attention_dropout: float, selective: bool) -> None:
        super().__init__()
        self.block = copy.deepcopy(max(model.blocks, key=_num_trained))
        self.block.attention.dropout = attention_dropout
        if selective:
            self.block.attention.call = call_checkpointed

    def forward(self, *inputs: object) -> torch.Tensor:
        """Return what the block does."""
        return self.block.forward(*inputs)


def _num_trained(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)


def _axes_key(ranks: PlannedRanks) -> tuple:
    """Return what the parts that a rank has of a layer, and its activations, depend on."""
    parallel = ranks.parallel
    return (
        ranks.tensor_size, ranks.context_size,
        ranks.tensor_size > 1 and parallel.sequence_parallel, parallel.cp_comm_type,
    )  # fmt: skip


def _subunits(
    unit: nn.Module, others: Collection[nn.Module], stores_frozen: bool
) -> tuple[tuple[nn.Parameter, ...], ...]:
    """Return the own parameters of a unit and those of its adapters, without empty lists.

    Modules in `others` do not belong to the unit.
    """
    unit_parameters = own_parameters(unit, others)
    parameters = [parameter for parameter in unit.parameters() if parameter in unit_parameters]
    adapters = trained_subunits(unit, others) if stores_frozen else {}
    adapter_parameters = set().union(*adapters.values())
    own = tuple(parameter for parameter in parameters if parameter not in adapter_parameters)
    adapter = tuple(parameter for parameter in parameters if parameter in adapter_parameters)
    return tuple(subunit for subunit in (own, adapter) if subunit)
