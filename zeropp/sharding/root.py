"""A module that is called on its own: its units, and what acts before, in and after its passes."""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from zeropp import fsdp_adapter as fsdp
from zeropp.settings.zero_config import ZeroConfig
from zeropp.sharding.passes import Passes
from zeropp.sharding.plan import Plan, UnitPlan
from zeropp.sharding.whole_weights import WholeWeights
from zeropp.sharding.wiring import Wiring
from zeropp.wire.gradient_use import GradientUse
from zeropp.wire.gradients import Gradients
from zeropp.wire.kept_weights import KeptWeights
from zeropp.wire.scalar_gradients import ScalarGradients
from zeropp.wire.secondary_copies import copies_of
from zeropp.wire.traffic import Traffic


class Root:
    """A sharded model that is called on its own: a whole model, or a stage of a pipeline.

    units: its blocks in forward order, and then itself. `group` are the data ranks.
    """

    def __init__(
        self,
        model: fsdp.FSDPModule,
        plan: Plan,
        config: ZeroConfig,
        group: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        self.model, self.stage, self.device = model, plan.stage, device
        self.units: tuple[fsdp.FSDPModule, ...] = ()
        self._apart: set[fsdp.FSDPModule] = set()  # inside the unit before them
        self.traffic, self.gradients = Traffic(), Gradients()
        self.reduces_once, self.keeps_root = plan.reduces_once, plan.keeps_roots
        self._num_ranks = group.size()
        self.copies = copies_of(plan.units[-1].axis.weights, config)
        self.scalars = ScalarGradients(model, group, device)
        self.kept = KeptWeights(model, self.copies, group if self.stage else None)
        is_alone = self._num_ranks == 1
        self.use = None if is_alone else GradientUse([group], device, self.gradients, self.scalars)
        self._wiring = Wiring(self.traffic, self.use, self.kept)
        self.whole = WholeWeights(model, self._wiring.gathers, self.kept, self.gradients)
        self.passes = Passes(
            model,
            self.whole,
            accumulates=self.reduces_once,
            calls_units=plan.calls_units,
            use=self.use,
            copies=self.copies,
            scalars=self.scalars,
            gradients=self.gradients,
        )

    def add(self, units: Sequence[fsdp.FSDPModule], plans: Sequence[UnitPlan]) -> None:
        """Connect units of the model as planned, between two passes; `order` sets their order."""
        self.kept.add(self.model, units)
        self.passes.add(units)
        for unit, plan in zip(units, plans, strict=True):
            self._wiring.connect(unit, plan, stage=self.stage)
            if plan.is_apart:
                self._apart.add(unit)

    def order(self, units: Sequence[fsdp.FSDPModule], *, in_turn: bool = False) -> None:
        """Set the order of all units, and which are gathered while others compute.

        On CPUs, blocks are gathered ahead of their forward passes. With `in_turn`, each backward
        pass gathers the blocks one after another, although passes of other batches came between.
        """
        self.units = tuple(units)
        *blocks, _ = self.units
        if self._num_ranks > 1 and blocks and self.device.type == "cpu":
            fsdp.gather_ahead(self.model, blocks)
        if self._num_ranks > 1 and in_turn:
            fsdp.gather_back(self._backwards(blocks))

    def _backwards(self, blocks: Sequence[fsdp.FSDPModule]) -> list[fsdp.FSDPModule]:
        """Return units in the opposite order of a backward pass: each after those inside it."""
        ordered: list[fsdp.FSDPModule] = []
        for unit in blocks:
            ordered.insert(len(ordered) - (unit in self._apart), unit)
        return ordered

    def begin_micro_step(self, *, last: bool, accumulate: bool = False) -> None:
        """Set what the next backward does with weights and gradients."""
        reduces = last or not (accumulate or self.reduces_once)
        self.scalars.is_due = last
        for unit in self.units:
            fsdp.set_gradient_dtypes(unit)
            unit.set_requires_gradient_sync(reduces, recurse=False)
            stays = self.stage < 3 or self.keeps_root and unit is self.model
            unit.set_reshard_after_backward(last or not stays, recurse=False)

    def reduce_accumulated(self) -> None:
        """Reduce gradients that backward passes have accumulated, without another pass."""
        self.begin_micro_step(last=True)
        fsdp.reduce_accumulated(self.model, self.scalars.begin)

    def discard_gradients(self, set_to_none: bool = True) -> None:
        """Clear all gradients of a step, including those that are not in any `.grad`."""
        if set_to_none:
            self.passes.discard()
            return
        for unit in self.units:
            fsdp.discard_gradients(unit, set_to_none)

    def release(self) -> None:
        """Free weights that forward-only passes, or one that failed, left gathered."""
        if fsdp.backward_id() == -1:
            self.passes.recover()
        for unit in self.units:
            fsdp.free_gathered(unit)
