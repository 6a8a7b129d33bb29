"""ZeRO++ for a model that another program has sharded: one call sets its collectives.

    attached = zeropp.attach(model, "ds_zeropp_config.json")

The model consists of units made by FSDP2's `fully_shard`. They keep their modules, dtypes,
prefetching, the times at which gradients are reduced, and the factor by which FSDP2 divides the
sums. Only what is sent changes: weights by qwZ and hpZ, gradients by qgZ.
"""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from operator import attrgetter
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from zeropp import fsdp_adapter as fsdp
from zeropp.errors import InputError
from zeropp.exports import CAPABILITIES, declared
from zeropp.ranks.coordination import among, fail_together_along, require_same
from zeropp.settings.zero_config import ZeroConfig
from zeropp.sharding.checks import (
    Units,
    data_group,
    gather_obstacle,
    obstacles,
    require_attachable_settings,
    require_module,
    require_sharded,
    require_types,
    unit_values,
)
from zeropp.sharding.forecast import Rows, describe, rank_bytes
from zeropp.sharding.grid import find_nodes_of, lines_of_ranks
from zeropp.sharding.plan import DataAxis, Plan, UnitPlan
from zeropp.sharding.root import Wiring
from zeropp.wire.gradients import GradientUse
from zeropp.wire.kept_weights import kept_weights
from zeropp.wire.rank_group import everyone
from zeropp.wire.traffic import Traffic

log = logging.getLogger("zeropp")
STAGE = "zero_optimization.stage"
HONOURED = frozenset(
    {
        "communication_data_type",
        STAGE,
        "zero_optimization.zero_quantized_weights",
        "zero_optimization.zero_hpz_partition_size",
        "zero_optimization.zero_quantized_gradients",
        "zeropp.ranks_per_node",
        "zeropp.weight_bits",
        "zeropp.gradient_bits",
        "zeropp.code_messages",
        "zeropp.secondary_in_evaluation",
        *declared("ATTACHABLE", CAPABILITIES),
    }
)


def attach(model: nn.Module, config: ZeroConfig | Mapping | str | Path) -> "Attached":
    """Let a model that `fully_shard` has sharded send what ZeRO++ sends; undone by `detach()`.

    All ranks call `attach` between two steps, before or after the optimizer is made. Values that
    are not quantized are sent in the dtype that FSDP2 would use.

    Layers that other ranks split may be sharded over some of the data ranks, as units of their own
    or as a parameter group of their block's unit. They then send along an axis of their own; tokens
    are sent as before.

    A unit keeps its collectives if it is only replicated, or if it has collectives that are not
    FSDP2's. So does a unit whose parameters have all-gather hooks, if weights are to be quantized
    or kept, or have several types, if they are to be quantized. `Attached.skipped` says which ones
    and why. With HSDP, FSDP2 still sums over the replicas, without quantization.

    Args:
        model: A model to whose blocks and root `fully_shard` was applied.
        config: A `ZeroConfig`, or DeepSpeed's JSON as a file, a text or a mapping. Only
            `zero_quantized_weights`, `zero_hpz_partition_size`, `zero_quantized_gradients`,
            `communication_data_type` and the section `zeropp` have an effect.

    Returns:
        The units that send as ZeRO++ does, those that do not, and the ledger of bytes.

    Raises:
        InputError: On all ranks, before anything is changed, for a model that is not sharded or
            attached already, stage 0, an hpZ partition that does not fit, units on meshes of which
            none contains the others, 64-bit weights or gradients, settings that need
            `zeropp.shard`, and ranks whose settings, units or parameters differ.
        RankError: On the other ranks, for any other exception of one rank.

    Example:
        ```python
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
        settings = {"zero_optimization": {"stage": 3, "zero_quantized_weights": True}}
        attached = zeropp.attach(model, settings)
        model(inputs).sum().backward()
        attached.detach()
        ```
    """
    require_module(model, "zeropp.attach")
    named = fsdp.named_units(model)
    lines = lines_of_ranks(each for unit in named.values() for each in fsdp.shards(unit))
    with fail_together_along(lines):
        require_sharded(model, named)
        attached = _plan_attachment(model, named, config)
    for group in (attached.group, *lines):  # replicas of shards, too
        with fail_together_along(lines), among(group):
            require_same(
                attached.settings(),
                "give all ranks the same settings and the same units",
                caller="zeropp.attach",
            )
    attached.install()
    if dist.get_rank() == 0:
        _log(attached)
    return attached


def _plan_attachment(
    model: nn.Module, named: Units, config: ZeroConfig | Mapping | str | Path
) -> "Attached":
    """Return what `attach` installs; nothing is sent or changed yet."""
    if not isinstance(config, ZeroConfig):
        config = ZeroConfig.from_json(config)
    require_attachable_settings(config)
    skipped = obstacles(named)
    units = _others(named, skipped)
    data_group(units)
    axes = _axes_of(units, config)
    for name, unit in units.items():
        if (reason := gather_obstacle(unit, axes[name].weights)) is not None:
            skipped[name] = reason
    units = _others(named, skipped)
    planned = {name: _plan_unit(unit, axes[name], config, model) for name, unit in units.items()}
    require_types(units, {name: plan.wire_dtype for name, plan in planned.items()})
    first, *_ = planned.values()
    plan = Plan(
        stage=3,
        reduces_once=True,
        keeps_roots=False,
        compute_dtype=first.dtype,
        units=tuple(planned.values()),
    )
    return Attached(model, units, skipped, data_group(units), plan, config)


class Attached:
    """A model that is attached: its units, its ledger, and what is kept of gathered weights.

    `units` and `skipped`, which has reasons, are by the names of modules. A unit is in both if it
    has several parameter groups, of which some are skipped.
    """

    def __init__(
        self,
        model: nn.Module,
        units: Units,
        skipped: Mapping[str, str],
        group: dist.ProcessGroup,
        plan: Plan,
        config: ZeroConfig,
    ) -> None:
        self.model, self.skipped = model, dict(skipped)
        modules = {fsdp.module_of(unit) for unit in units.values()}
        self.units = {name: each for name, each in model.named_modules() if each in modules}
        self.config, self.plan = config, plan
        self.group, self.traffic = group, Traffic()
        self._planned = units
        self._previous = {unit: fsdp.collectives_of(unit) for unit in units.values()}

    def install(self) -> None:
        """Set the collectives; `attach` does it."""
        units = [*self._planned.values()]
        route = max((unit.axis.weights for unit in self.plan.units), key=attrgetter("keeps"))
        self.kept = kept_weights(self.model, self.group, route, self.config.zeropp)
        groups = [self.group, *filter(None, map(fsdp.replica_group, units))][:2]
        use = GradientUse(groups, fsdp.device_of(units[0]))
        self._wiring = Wiring(self.traffic, use, self.kept, divides=False)
        for unit, plan in zip(units, self.plan.units, strict=True):
            if plan.axis.nodes.num_ranks > 1:  # else FSDP2 sends nothing
                self._wiring.connect(unit, plan, stage=self.plan.stage)
        if self.group.size() > 1:
            self._gather_ahead()
        self.kept.add(self.model, units)
        self._wiring.undo.callback(self.kept.close)

    def detach(self) -> None:
        """Restore the units' previous collectives; all ranks call it between steps."""
        self.weights_changed()
        self._wiring.undo.close()

    def weights_changed(self) -> None:
        """Drop gathered weights, hpZ's copies included, because the shards have changed.

        Steps of torch.optim optimizers, `load_state_dict` and writes in place that raise a tensor's
        version do this by themselves. Call it on every rank after writing into the shards by other
        means, and after an exception in a pass that is caught, beside FSDP2's `reset_iter_state()`:
        ranks may have come to different points.
        """
        self.kept.drop()

    @contextmanager
    def exact_weights(self) -> Iterator[None]:
        """Gather weights inside as they are, instead of rounded to codes.

        For `unshard()` by others, as where weights are sent to another program. On leaving, weights
        that were gathered are freed.
        """
        self.weights_changed()
        for unit in self._wiring.gathers:
            fsdp.use_all_gather(unit, self._previous[unit].all_gather)
        try:
            yield
        finally:
            self.weights_changed()
            for unit, gather in self._wiring.gathers.items():
                fsdp.use_all_gather(unit, gather)

    def settings(self) -> dict[str, object]:
        """Return by name what must be the same on all ranks, or they would wait for each other."""
        dotted = {name: attrgetter(name)(self.config) for name in sorted(HONOURED - {STAGE})}
        per_node = [axis.nodes.ranks_per_node for axis in self.plan.axes]
        others = {"ranks per node": per_node, "units that are skipped": self.skipped}
        return dotted | others | unit_values(self.model, self._planned)

    def describe(self, num_micro_batches: int = 1) -> Rows:
        """Return table rows (name, text): the collectives as they run, and the bytes a node sends.

        A text may have several lines.
        """
        return describe(self.plan, num_micro_batches)

    def expected_traffic(
        self, num_micro_batches: int = 1, *, reduces_once: bool = True
    ) -> dict[tuple[str, str], int]:
        """Return the bytes this rank sends per step, by (purpose, hop).

        With `reduces_once`, gradients are reduced once per step, as by a trainer that accumulates
        them under `no_sync`; otherwise after each micro-batch. The forecast leaves out what FSDP2's
        own collectives send: gradients of skipped units and, with HSDP, the sums over replicas.
        """
        return rank_bytes(replace(self.plan, reduces_once=reduces_once), num_micro_batches)

    def plain_traffic(
        self, num_micro_batches: int = 1, *, reduces_once: bool = True
    ) -> dict[tuple[str, str], int]:
        """Return `expected_traffic` of the same units under plain FSDP2, to compare with."""
        plan = replace(self.plan.plain(), reduces_once=reduces_once)
        return rank_bytes(plan, num_micro_batches)

    def _gather_ahead(self) -> None:
        """On CPUs, issue gathers while others compute, unless their order was set before."""
        units = [*self.units.values()]
        root = next(each for each in self.model.modules() if isinstance(each, fsdp.FSDPModule))
        inside = set(root.modules())
        is_cpu = fsdp.device_of(units[0]).type == "cpu"
        if not is_cpu or not inside.issuperset(units) or any(map(fsdp.prefetches, (root, *units))):
            return
        blocks = [unit for unit in units if unit is not root]
        fsdp.gather_ahead(root, blocks)
        self._wiring.undo.callback(fsdp.gather_in_turn, root, blocks)


def _log(attached: Attached) -> None:
    """Log what is sent from now on, and which settings have no effect."""
    plan = attached.plan
    for axis in plan.axes:
        units = tuple(unit for unit in plan.units if unit.axis is axis)
        where = f" of {len(units)} units on {axis.nodes.num_ranks} ranks"
        for name, text in describe(replace(plan, units=units)):
            if name != "sends":
                what = name + (where if len(plan.axes) > 1 else "")
                log.info("zeropp.attach, %s: %s", what, text.replace("\n", "; "))
    if without_effect := sorted(attached.config.file_keys - HONOURED):
        log.info(
            "zeropp.attach: no effect on a model that is sharded already: %s",
            ", ".join(without_effect),
        )
    if attached.skipped:
        log.warning("zeropp.attach leaves these units as they are: %s", _listed(attached.skipped))


def _axes_of(units: Units, config: ZeroConfig) -> dict[str, DataAxis]:
    """Return by name the axis of each unit; those that are on the same ranks have one axis."""
    axes: dict[tuple[int, ...], DataAxis] = {}
    by_name = {}
    for name, unit in units.items():
        group = fsdp.shard_group(unit)
        ranks = tuple(dist.get_process_group_ranks(group))
        if ranks not in axes:
            nodes = find_nodes_of(group, config)
            axes[ranks] = DataAxis.of(config, everyone(nodes, group.rank(), ranks))
        by_name[name] = axes[ranks]
    return by_name


def _plan_unit(unit: fsdp.Unit, axis: DataAxis, config: ZeroConfig, model: nn.Module) -> UnitPlan:
    return UnitPlan(
        specs=fsdp.own_specs(unit),
        axis=axis,
        dtype=fsdp.dtypes_of(unit)[0],
        wire_dtype=_wire_dtype(unit, config),
        regathers=fsdp.frees_after_forward(unit, model),
        num_shards=axis.nodes.num_ranks,
        mixed_bytes=fsdp.mixed_bytes(unit),
    )


def _wire_dtype(unit: fsdp.Unit, config: ZeroConfig) -> torch.dtype:
    """Return what unquantized gradients travel in: what is set, or what FSDP2 would send."""
    if config.communication_data_type is not None:
        return getattr(torch, config.wire_format)
    return fsdp.dtypes_of(unit)[1]


def _others(units: Units, skipped: Mapping[str, str]) -> Units:
    """Return the units that are not skipped; raise InputError if there are none."""
    others = {name: unit for name, unit in units.items() if name not in skipped}
    if not others:
        raise InputError(f"zeropp.attach: no unit can be attached: {_listed(skipped)}")
    return others


def _listed(reasons: Mapping[str, str]) -> str:
    return "; ".join(f"{name or 'the model'}: {reason}" for name, reason in reasons.items())
