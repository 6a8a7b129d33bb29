"""A module that is called on its own: its units, and what acts before, in and after its passes.

`Wiring` sets our collectives on units of FSDP2: the only place that installs them.

A pass without backward leaves the root's weights gathered, at stages 1 and 2 all of them, so that
evaluation and generation do not gather them again. FSDP2 leaves them in the modules, too. An
optimizer made then would hold weights that the next gather overwrites, and what is written to them
or frozen would be lost. So the modules get their shards back when such a pass ends.

A pass that failed is forgotten before the next one begins. One that failed in forward leaves no
gradients. One that failed in backward leaves those of some units: they must be cleared, and the
micro-batches of the step repeated. All ranks must have failed in the same pass.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from zeropp import fsdp_adapter as fsdp
from zeropp.errors import InputError
from zeropp.settings.zero_config import ZeroConfig
from zeropp.sharding.plan import DataAxis, Plan, UnitPlan
from zeropp.sharding.whole_weights import WholeWeights
from zeropp.wire.coding_choice import CodingTrials
from zeropp.wire.collectives import GradientMean, WeightGather
from zeropp.wire.gradients import Gradients, GradientUse, ScalarGradients
from zeropp.wire.in_flight import Reductions
from zeropp.wire.kept_weights import KeptWeights, kept_weights
from zeropp.wire.rank_group import RankGroup
from zeropp.wire.shard_holders import ShardHolder, add_holder
from zeropp.wire.traffic import Traffic

Hops = tuple[RankGroup | None, RankGroup | None]  # the inner and the outer one
INCOMPLETE = (
    "a backward pass ended with an exception, and the gradients of this step are incomplete: call "
    "the engine's zero_grad() or the sharding's discard_gradients(), and repeat all micro-batches "
    "of the step"
)


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
                unit.set_gradient_divide_factor(float(plan.axis.num_losses))
            return
        self.undo.callback(fsdp.restore_collectives, unit, fsdp.collectives_of(unit))
        weights, gradients = self._hops_of(plan.axis, fsdp.device_of(unit))
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

    def _hops_of(self, axis: DataAxis, device: torch.device) -> tuple[Hops, Hops]:
        """Connect this rank, once, to the inner and the outer hop of weights and of gradients."""
        if axis not in self._hops:
            self._hops[axis] = tuple(
                axis.group.hops(route.inner, self._traffic, purpose, route.coding)
                for route, purpose in ((axis.weights, "weights"), (axis.gradients, "gradients"))
            )
            outer = [hop.coding for _, hop in self._hops[axis] if hop is not None]
            if tried := [coding for coding in outer if coding.is_tried]:
                trials = CodingTrials(axis.group.ranks, tried, device)
                self._kept.at_begin.append(trials.begin_pass)
                self._use.at_end.append(trials.end_pass)
        return self._hops[axis]


class Root(ShardHolder):
    """A sharded model that is called on its own: a whole model, or a stage of a pipeline.

    units: its blocks in forward order, and then itself, cut as planned. `group` are the data ranks.
    in_turn: see `order`. While no pass runs, modules hold their shards, or whole parameters.
    Between a forward pass and its backward pass they hold what FSDP2 gives them: a step of an
    optimizer made there raises InputError.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        units: Sequence[fsdp.FSDPModule],
        config: ZeroConfig,
        group: dist.ProcessGroup,
        device: torch.device,
        *,
        in_turn: bool,
    ) -> None:
        self.model, self.stage, self.device, self.units = model, plan.stage, device, tuple(units)
        self._apart: set[fsdp.FSDPModule] = set()  # inside the unit before them
        self.traffic, self.gradients = Traffic(), Gradients()
        self.reduces_once, self.keeps_root = plan.reduces_once, plan.keeps_roots
        self._num_ranks = group.size()
        sharing = group if self.stage else None
        self.kept = kept_weights(model, sharing, plan.units[-1].axis.weights, config.zeropp)
        self.scalars = ScalarGradients(model, group, device)
        is_alone = self._num_ranks == 1
        self.use = None if is_alone else GradientUse([group], device, self.gradients, self.scalars)
        self._wiring = Wiring(self.traffic, self.use, self.kept)
        self.whole: WholeWeights | None = None
        self._incomplete = False  # gradients, as a backward pass failed
        self._depth = 0  # of calls of the model within its own forward
        self.has_called = False  # a method, whose output may get gradients
        self._uncalled = None if plan.calls_units else fsdp.UncalledUnits(model)
        model.register_forward_pre_hook(self._enter, prepend=True)
        model.register_forward_hook(self._leave, always_call=True)  # after FSDP2's
        if self._uncalled:
            fsdp.call_methods_by(model, self._call)
        add_holder(self)
        self.order(self.units, in_turn=in_turn)
        self.add(self.units, plan.units)

    def add(self, units: Sequence[fsdp.FSDPModule], plans: Sequence[UnitPlan]) -> None:
        """Connect units of the model as planned, between two passes; `order` sets their order."""
        self.kept.add(self.model, units)
        if self._uncalled:
            self._uncalled.add(units)
        for unit in units:
            fsdp.show_between_passes(unit)
            fsdp.use_whole_parameters(unit)
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

    def keep_whole(self) -> None:
        """Let modules hold whole, plain parameters between passes from now on."""
        whole = WholeWeights(
            self.model, self.units, self._wiring.gathers, self.kept, self.gradients
        )
        self.whole = whole if whole.units else None

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

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuse an optimizer of gathered weights; let shards take what was written to them."""
        held = (each for group in optimizer.param_groups for each in group["params"])
        self.require_shards(held, "the optimizer holds")
        if self.whole:
            self.whole.before_step(optimizer)

    def require_shards(self, parameters: Iterable[torch.Tensor], user: str) -> None:
        """Raise InputError if a `user` has weights of the model as they are gathered for a pass."""
        plain = [each for each in parameters if not isinstance(each, DTensor)]
        names: dict[nn.Parameter, str] = {}
        for unit in self.units if plain else ():
            names |= fsdp.gathered_names(unit)
        for parameter in plain:
            if parameter in names:
                raise InputError(
                    f"{user} {names[parameter]} as it was gathered for a pass, and changes of that "
                    "would be lost: take the model's parameters before the forward pass, or after "
                    "the backward pass, when they are its shards"
                )

    def require_complete(self) -> None:
        """Raise InputError if the last backward pass failed and its gradients are still there."""
        self.recover()
        if not self._incomplete:
            return
        if any(map(self._has_gradients, self.units)):
            raise InputError(INCOMPLETE)
        self.discard_gradients()

    def discard_gradients(self, set_to_none: bool = True) -> None:
        """Clear all gradients of a step, including those that are not in any `.grad`.

        With `set_to_none`, the next pass starts clean.
        """
        if set_to_none:
            self.recover()
        for unit in self.units:
            fsdp.discard_gradients(unit, set_to_none)
        if set_to_none:
            shards = (shard for unit in self.units for shard in fsdp.shards(unit))
            for parameter in (*shards, *self.scalars.parameters()):
                parameter.grad = None
                self.gradients.clear(parameter)
            self._incomplete = False

    def release(self) -> None:
        """Free weights that forward-only passes, or one that failed, left gathered."""
        if fsdp.backward_id() == -1:
            self.recover()
        for unit in self.units:
            fsdp.free_gathered(unit)

    def recover(self) -> None:
        """Let FSDP2 forget a pass that did not end."""
        if self._depth > 1 or not fsdp.is_in_pass(self.model):
            return
        self._incomplete = self._incomplete or fsdp.awaits_end_of_backward(self.model)
        fsdp.abandon_pass(self.model)
        if self.use is not None:
            self.use.discard()
        self.kept.drop_copies()  # ranks may have brought different ones up to date

    def _enter(self, *_: object) -> None:
        self._depth += 1
        if self._depth == 1 and fsdp.backward_id() == -1:
            self._hide_whole()
            self.recover()
            if torch.is_grad_enabled():
                self.require_complete()
        if self._uncalled and not torch.compiler.is_compiling():  # which cannot gather in a pass
            self._uncalled.watch(True)

    def _leave(self, _: object, __: object, output: Any, *, with_root: bool = False) -> None:
        self._depth = max(0, self._depth - 1)  # a hook before `_enter` may have raised
        if self._depth == 0:
            if self._uncalled:
                self._uncalled.watch(False, with_root=with_root)
            for unit in () if _needs_backward(output) else self.units:
                fsdp.show_shards(unit)
            if self.whole:
                self.whole.show()

    def _hide_whole(self) -> None:
        """Begin a pass as one after an evaluation: weights are gathered, modules hold shards."""
        if self.whole and not torch.compiler.is_compiling():
            self.whole.hide(takes=torch.is_grad_enabled())

    def _call(self, method: Callable, *arguments: Any, **options: Any) -> Any:
        """Call a method of the model, which may compute with it if it is given tensors."""
        given = any(isinstance(e, torch.Tensor) for e in pytree.tree_leaves((arguments, options)))
        if not given or self._depth or fsdp.backward_id() != -1 or torch.compiler.is_compiling():
            return method(*arguments, **options)
        self._depth = 1
        self._hide_whole()
        self.recover()
        self._uncalled.watch(True, with_root=True)
        output = None
        try:
            output = fsdp.note_backward(self.model, method(*arguments, **options))
            self.has_called = self.has_called or _needs_backward(output)
            return output
        finally:
            self._leave(None, None, output, with_root=True)

    def _has_gradients(self, unit: fsdp.FSDPModule) -> bool:
        """Whether a unit has gradients, maybe of micro-batches that succeeded."""
        has_means = any(self.gradients.of(shard) is not None for shard in fsdp.shards(unit))
        return has_means or self.reduces_once and fsdp.accumulates(unit)


def _needs_backward(output: Any) -> bool:
    """Whether gradients are enabled, and what a pass returns may have some."""
    leaves = pytree.tree_leaves(output)
    return torch.is_grad_enabled() and any(getattr(e, "requires_grad", True) for e in leaves)
