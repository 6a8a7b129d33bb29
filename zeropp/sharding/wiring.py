"""Our collectives, set on units of FSDP2: the only place that installs them."""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

import torch

from zeropp import fsdp_adapter as fsdp
from zeropp.sharding.plan import DataAxis, UnitPlan
from zeropp.wire.collectives import GradientMean, WeightGather
from zeropp.wire.gradient_use import GradientUse
from zeropp.wire.in_flight import Reductions
from zeropp.wire.kept_weights import KeptWeights
from zeropp.wire.rank_group import RankGroup, everyone
from zeropp.wire.route import Route
from zeropp.wire.traffic import Traffic

Hops = tuple[RankGroup | None, RankGroup | None]  # the inner and the outer one


class Wiring:
    """Connects the units of one root; `undo` restores the collectives that they had.

    With `divides`, our collective averages gradients. Without it, FSDP2 divides their sums by the
    factor that was set when the units were sharded.
    """

    def __init__(
        self,
        traffic: Traffic,
        use: GradientUse | None,
        kept: KeptWeights | None = None,
        *,
        divides: bool = True,
    ) -> None:
        self.gathers: dict[fsdp.Unit, WeightGather] = {}
        self.undo = ExitStack()
        self._traffic, self._use, self._kept, self._divides = traffic, use, kept, divides
        self._in_flight = Reductions()
        self._hops: dict[tuple[DataAxis, str], Hops] = {}

    def connect(self, unit: fsdp.Unit, plan: UnitPlan, *, stage: int) -> None:
        """Install the planned collectives; stage 0 and a single rank keep those of FSDP2."""
        if not plan.specs:
            return
        if stage == 0 or plan.axis.nodes.num_ranks == 1:
            self.watch(unit)
            if plan.axis.num_losses > plan.axis.nodes.num_ranks:
                fsdp.divide_gradients(unit, plan.axis.num_losses)
            return
        self.undo.callback(fsdp.restore_collectives, unit, fsdp.collectives_of(unit))
        hops = self._hops_of(plan.axis, plan.axis.weights, "weights")
        gather = WeightGather(unit, plan.axis.weights, hops, self._kept)
        self.gathers[unit] = gather
        fsdp.use_all_gather(unit, gather)
        self.use_mean(unit, plan.axis, plan.wire_dtype)

    def watch(self, unit: fsdp.Unit) -> None:
        """Note which gradients FSDP2 reduces."""
        note: Callable | None = None
        if self._use is not None:
            self._use.add(unit)
            note = partial(self._use.note, unit)
        self.undo.callback(fsdp.before_reduction(unit, note))

    def use_mean(self, unit: fsdp.Unit, axis: DataAxis, wire_dtype: torch.dtype) -> None:
        """Average the unit's gradients along the route of the axis."""
        route, rounds = axis.gradients, fsdp.replica_group(unit) is not None
        hops = self._hops_of(axis, route, "gradients")
        is_cpu = fsdp.device_of(unit).type == "cpu"
        in_flight = self._in_flight if is_cpu and not rounds else None
        mean = GradientMean(
            unit,
            route,
            hops,
            wire_dtype,
            in_flight,
            self._use,
            num_losses=axis.num_losses if self._divides else 1,
            rounds=rounds,
        )
        self.undo.callback(mean.leave)
        fsdp.use_reduce_scatter(unit, mean, divides=self._divides)

    def _hops_of(self, axis: DataAxis, route: Route, purpose: str) -> Hops:
        """Connect this rank to its inner and its outer hop, once."""
        if (axis, purpose) not in self._hops:
            axis_group = everyone(route.nodes, axis.position, axis.ranks)
            inner, outer = axis_group.consecutive(route.inner), axis_group.strided(route.inner)
            self._hops[axis, purpose] = (
                inner.connected(self._traffic, purpose),
                outer.connected(self._traffic, purpose, is_coded=bool(route.is_coded)),
            )
        return self._hops[axis, purpose]
