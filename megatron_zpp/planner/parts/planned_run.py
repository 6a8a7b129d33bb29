"""A run before it is started: a rank's part of the model, cut into FSDP units and shards.

The parameters are cut as FSDP2 and ZeRO-Offload cut them.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import groupby

import torch
from torch import nn

from megatron_zpp.capabilities.muon.capability import MuonCapability, muon_options
from megatron_zpp.model.part import Execution, Part
from megatron_zpp.planner.parts.meta_model import META, MetaModel, own_axes
from megatron_zpp.planner.parts.planned_muon import PlannedMuon
from megatron_zpp.planner.parts.planned_ranks import PlannedRanks
from megatron_zpp.planner.parts.planned_unit import FP32_BYTES, Unit, stored_bytes
from megatron_zpp.recipe.activation_forecast import Forecast
from megatron_zpp.recipe.capability import Capability, capabilities_of
from megatron_zpp.settings.capability_flags import CAPABILITIES
from megatron_zpp.settings.config import Config
from zeropp.capabilities.offload import HOST
from zeropp.fsdp_adapter import ShardSpec
from zeropp.optim import OPTIMIZER
from zeropp.settings import declared
from zeropp.sharding import DataAxis, Plan, master_devices, node_bytes, places_of, plan_units
from zeropp.wire import AXES, HOPS, PURPOSES, Message, everyone, sum_of

Sent = dict[tuple[str, str], float]  # (purpose or axis, hop) -> bytes
Units = tuple[tuple[int | None, Unit], ...]  # each with its layer, None for a root


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """Everything about a rank of a run that its memory depends on.

    `stages` are those of the rank, one without a pipeline. `units_of_stages` has the blocks of
    each, each block followed by what in it has an axis of its own, and then the root.
    """

    model: MetaModel
    ranks: PlannedRanks
    stages: tuple[Part, ...]
    units_of_stages: tuple[Units, ...]
    plan: Plan
    is_cpu: bool

    @property
    def config(self) -> Config:
        """Return the configuration of the run."""
        return self.ranks.config

    @cached_property
    def units(self) -> tuple[Unit, ...]:
        """Return the units of all stages."""
        return tuple(unit for units in self.units_of_stages for _, unit in units)

    @property
    def num_ranks(self) -> int:
        """Return the number of ranks of the data axis, over which weights are sharded."""
        return self.plan.num_ranks

    @cached_property
    def trained(self) -> int:
        """Return the trained elements of this rank's padded shards."""
        return sum(unit.trained for unit in self.units)

    @cached_property
    def frozen(self) -> int:
        """Return the frozen bytes of this rank's padded shards."""
        return sum(unit.frozen for unit in self.units)

    @property
    def shards(self) -> Iterator[tuple[nn.Parameter, ShardSpec]]:
        """Yield each parameter, or the one of its size in the first layer alike, and its shard."""
        for unit in self.plan.units:
            yield from zip(unit.parameters, unit.specs, strict=True)

    @property
    def trained_tensors(self) -> Iterator[tuple[int, int, int]]:
        """Yield (elements, elements of a shard, number of shards) of what is trained, in order."""
        shards = {
            parameter: (spec.elements, unit.num_shards)
            for unit in self.plan.units
            for parameter, spec in zip(unit.parameters, unit.specs, strict=True)
            if spec.trainable
        }
        own = {None, *(layer for stage in self.stages for layer in stage.layers)}
        for layer, parameter in self.model.parameters(self.ranks):
            if layer in own and parameter in shards:
                yield parameter.numel(), *shards[parameter]

    @cached_property
    def forecast(self) -> Forecast:
        """Return the forecast of what is sent beside weights and gradients."""
        return Forecast(
            self.model.split(self.ranks),
            self.ranks,
            self.config.batch.micro_batch_size,
            self.compute_dtype,
            Execution(self.config.recompute),
        )

    def step_messages(self) -> Iterator[Message]:
        """Yield what is sent once per step: gradients that ranks of an axis have parts of, and what
        capabilities send."""
        model, ranks = self.model, self.ranks
        partial = model.partial(ranks) if ranks.tensor_size > 1 else set()
        tokens = model.split(ranks).tokens.weight
        is_tied = ranks.pipeline_size > 1 and model.whole.head is None and tokens.requires_grad
        tied = {tokens} if is_tied else set()  # of the first and the last stage
        yield from self.forecast.gradients(
            [spec.elements for each, spec in self.shards if each in partial],
            [spec.elements for each, spec in self.shards if each in tied],
        )
        for each in self.capabilities:
            yield from each.messages(self.num_micro_batches)

    @cached_property
    def optimizer(self) -> PlannedMuon | None:
        """Return what the optimizer adds to a step beside an update by AdamW, if anything."""
        config, ranks, stages = self.config, self.ranks, self.stages
        if not any(isinstance(each, MuonCapability) for each in self.capabilities):
            return None
        layers, is_sharded = tuple(stage.layers for stage in stages), self.stage > 0
        key = ranks.parallel, ranks.nodes, layers, is_sharded
        make = partial(
            PlannedMuon,
            model=self.model.split(ranks),
            ranks=ranks,
            stages=stages,
            is_sharded=is_sharded,
        )
        return self.model.once(make, *key, muon_options(config.muon, config.zero))

    @cached_property
    def capabilities(self) -> tuple[Capability, ...]:
        """Return what else takes part in steps."""
        return capabilities_of(self.config, self.ranks)

    def sent_by_node(self) -> Sent:
        """Return what a node of ranks at this place of a pipeline sends in a step."""
        sent: Counter[tuple[str, str]] = Counter()
        if self.num_ranks > 1:
            sent.update(node_bytes(self.plan, self.num_micro_batches, typical=True))
        per_stage = (
            (self.num_micro_batches, message)
            for stage in self.stages
            for message in self.forecast.messages(stage)
        )
        for times, message in (*per_stage, *((1, each) for each in self.step_messages())):
            # All ranks of a node send, each in its own group of ranks.
            share = self.ranks.nodes.ranks_per_node / message.group.size
            for key, num_bytes in sum_of(map(message.of, message.group.members)).items():
                sent[key] += times * share * num_bytes
        names = [*PURPOSES, *AXES, *declared("PURPOSES", CAPABILITIES)]
        if self.optimizer is not None:
            sent.update(self.optimizer.sent_by_node)
            names.insert(len(PURPOSES), OPTIMIZER)
        return {(name, hop): sent[name, hop] for name in names for hop in HOPS}

    @property
    def stage(self) -> int:
        return self.plan.stage

    @cached_property
    def uses_engine(self) -> bool:
        """Return whether `zeropp.shard` wraps the model.

        A single rank in fp32 is only wrapped to offload weights or to store frozen weights as
        codes.
        """
        is_single_fp32 = self.num_ranks == 1 and self.compute_dtype.itemsize == FP32_BYTES
        return not is_single_fp32 or self.config.zero.always_gathers

    @cached_property
    def regathers(self) -> bool:
        """Return whether blocks are gathered for each use and freed after it."""
        return self.stage == 3 and (self.num_ranks > 1 or self.config.zero.always_gathers)

    @property
    def compute_dtype(self) -> torch.dtype:
        return self.plan.compute_dtype

    @property
    def offloads(self) -> bool:
        return self.config.zero.offloads_optimizer

    @cached_property
    def offloaded_shards(self) -> tuple[int, ...]:
        """Return the elements of each of this rank's padded shards that the host updates."""
        if not self.offloads:
            return ()
        trained = [(each, spec) for each, spec in self.shards if spec.trainable]
        ratio = self.config.zero.zero_optimization.offload_optimizer.ratio
        devices = master_devices([each for each, _ in trained], ratio, META)
        return tuple(
            spec.elements
            for (_, spec), device in zip(trained, devices, strict=True)
            if device == HOST
        )

    @property
    def num_micro_batches(self) -> int:
        """Return the micro-batches per step, at the final batch size."""
        batch_size = self.config.schedules.batch_size.final
        return batch_size // (self.config.batch.micro_batch_size * self.ranks.data_parallel_size)

    @property
    def construction_bytes(self) -> int:
        """Return the peak bytes on the device while the shards are filled.

        That is all shards, and the largest shard as numbers before it is encoded. On a CPU, which
        also is the host, it includes the largest weight.
        """
        if self.config.zero.offloads_weights and not self.is_cpu:
            return 0
        specs = [spec for unit in self.plan.units for spec in unit.specs]
        encoded = [spec.elements for spec in specs if spec.packed_bytes]
        temporary_elements = max(encoded, default=0)
        if self.is_cpu:
            temporary_elements += max(each.numel() for each, _ in self.shards)
        elif self.offloads:
            specs = [spec for spec in specs if not spec.trainable]
        return stored_bytes(specs) + FP32_BYTES * temporary_elements


Places = list[tuple[PlannedRun, int]]  # how many ranks of a pipeline are like each, in its order


def plan_run(model: MetaModel, ranks: PlannedRanks, *, is_cpu: bool) -> PlannedRun:
    """Return the planned run of a rank, on CPUs or on GPUs.

    Raises InputError for ranks that the nodes cannot hold alike, and for an hpZ partition that does
    not divide them.
    """
    zero, stages = ranks.config.zero, model.stages(ranks)
    units = tuple(_units_of_stages(model, ranks, stages))
    plan = Plan(
        stage=zero.stage,
        reduces_once=zero.reduces_once,
        keeps_roots=zero.reduces_once or ranks.pipeline_size > 1,
        compute_dtype=getattr(torch, zero.compute_format),
        units=tuple(part for each in units for _, unit in each for part in unit.parts),
    )
    return PlannedRun(
        model=model,
        ranks=ranks,
        stages=tuple(stages),
        units_of_stages=units,
        plan=plan,
        is_cpu=is_cpu,
    )


def _units_of_stages(
    model: MetaModel, ranks: PlannedRanks, stages: Iterable[Part]
) -> Iterator[Units]:
    """Yield the units of each of a rank's stages; inner ones are on axes of their own."""
    axis = DataAxis.of(ranks.config.zero, everyone(ranks.data_nodes, 0))
    alike, blocks = model.alike(ranks), model.split(ranks).blocks
    by_layer: dict[int, list[Unit]] = {}
    for stage in stages:
        root = model.root(ranks, stage)
        units: list[tuple[int | None, Unit]] = []
        for layer in stage.layers:
            first = alike[layer]
            if first not in by_layer:
                by_layer[first] = _units_of_block(blocks[first], ranks, axis)
            units += ((layer, unit) for unit in by_layer[first])
        cut = plan_units(root, (), places_of(root), axis, ranks.config.zero)
        yield (*units, (None, Unit(parts=cut)))


def _units_of_block(block: nn.Module, ranks: PlannedRanks, axis: DataAxis) -> list[Unit]:
    """Return a block, and what in it has an axis of its own."""
    num_losses, zero = axis.nodes.num_ranks, ranks.config.zero
    apart = {
        module: DataAxis.of(zero, everyone(ranks.nodes_of(own.size), 0), num_losses=num_losses)
        for module, own in own_axes(block).items()
    }
    root = nn.ModuleList([block])  # without parameters of its own
    places = places_of(root, (block, *apart))
    *cut, _ = plan_units(root, [block], places, axis, zero, apart=apart)
    first = next((i for i, unit in enumerate(cut) if unit.modules[0] in apart), len(cut))
    own, its_own = Unit(parts=tuple(cut[:first])), tuple(cut[first:])
    return [own, Unit(parts=its_own, is_inner=True)] if its_own else [own]


def plan_places(model: MetaModel, ranks: PlannedRanks, *, is_cpu: bool) -> Places:
    """Return the run at the places of its pipeline that differ: its ends, and between them.

    Of the places between the ends, the first holds the activations of the most micro-batches, and
    those differ that have other layers, or neighbours on another node. Raises as `plan_run` does.
    """
    size, per_node = ranks.pipeline_size, ranks.nodes.ranks_per_node
    stride = ranks.num_ranks // size
    layers = model.layer_kinds(ranks.config.recompute.recompute_num_layers)
    stages = ranks.parallel.stages(len(layers))

    def kind(place: int) -> tuple[object, ...]:
        """Return what places have in common: layers, ends of the pipeline, and ends of a node."""
        own = [layers[each.start : each.stop] for each in stages[place::size]]
        ends = place * stride, (place + 1) * stride
        begins, closes = (stride < per_node and end % per_node == 0 for end in ends)
        return place == 0, place == size - 1, begins, closes, own

    return [
        (plan_run(model, ranks.at(first), is_cpu=is_cpu), 1 + len(rest))
        for _, (first, *rest) in groupby(range(size), kind)
    ]
