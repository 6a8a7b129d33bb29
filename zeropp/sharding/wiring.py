"""Our collectives, set on units of FSDP2: the only place that installs them."""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

from zeropp import fsdp_adapter as fsdp
from zeropp.sharding.plan import DataAxis, UnitPlan
from zeropp.wire.collectives import GradientMean, WeightGather
from zeropp.wire.gradient_use import GradientUse
from zeropp.wire.in_flight import Reductions
from zeropp.wire.kept_weights import KeptWeights
from zeropp.wire.rank_group import RankGroup, everyone
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
        self._hops: dict[DataAxis, tuple[Hops, Hops]] = {}  # of weights, and of gradients

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
        weights, gradients = self._hops_of(plan.axis)
        rounds = fsdp.replica_group(unit) is not None
        is_cpu = fsdp.device_of(unit).type == "cpu"
        self.gathers[unit] = WeightGather(unit, plan.axis.weights, weights, self._kept)
        mean = GradientMean(
            unit,
            plan.axis.gradients,
            gradients,
            plan.wire_dtype,
            self._in_flight if is_cpu and not rounds else None,
            self._use,
            num_losses=plan.axis.num_losses if self._divides else 1,
            rounds=rounds,
        )
        fsdp.use_all_gather(unit, self.gathers[unit])
        self.undo.callback(mean.leave)
        fsdp.use_reduce_scatter(unit, mean, divides=self._divides)

    def watch(self, unit: fsdp.Unit) -> None:
        """Note which gradients FSDP2 reduces."""
        note: Callable | None = None
        if self._use is not None:
            self._use.add(unit)
            note = partial(self._use.note, unit)
        self.undo.callback(fsdp.before_reduction(unit, note))

    def _hops_of(self, axis: DataAxis) -> tuple[Hops, Hops]:
        """Connect this rank, once, to the inner and the outer hop of weights and of gradients."""
        if axis not in self._hops:
            whole = everyone(axis.nodes, axis.position, axis.ranks)
            self._hops[axis] = tuple(
                whole.hops(route.inner, self._traffic, purpose, is_coded=bool(route.is_coded))
                for route, purpose in ((axis.weights, "weights"), (axis.gradients, "gradients"))
            )
        return self._hops[axis]
