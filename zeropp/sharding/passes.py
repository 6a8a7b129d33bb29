"""The passes of one root: what must hold before a pass begins, and what it leaves behind.

A pass without backward leaves the root's weights gathered, at stages 1 and 2 all of them, so that
evaluation and generation do not gather them again. FSDP2 leaves them in the modules, too. An
optimizer made then would hold weights that the next gather overwrites, and what is written to them
or frozen would be lost. So the modules get their shards back when such a pass ends.

Under `zeropp.initialize`, at stages 0 to 2, modules hold whole parameters between passes instead,
which programs read and write. What is written is found by contents: this rank's rows are compared
with its shards, rounded as they were sent. Where they differ, the shards take what was written.

A pass that failed is forgotten before the next one begins. One that failed in forward leaves no
gradients. One that failed in backward leaves those of some units: they must be cleared, and the
micro-batches of the step repeated. All ranks must have failed in the same pass.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils import _pytree as pytree

from zeropp import fsdp_adapter as fsdp
from zeropp.errors import InputError
from zeropp.wire.collectives import WeightGather
from zeropp.wire.gradient_use import GradientUse
from zeropp.wire.kept_weights import KeptWeights, Notice, Units, notify_weights_written
from zeropp.wire.scalar_gradients import Gradients, ScalarGradients
from zeropp.wire.secondary_copies import SecondaryCopies

INCOMPLETE = (
    "a backward pass ended with an exception, and the gradients of this step are incomplete: call "
    "the engine's zero_grad() or the sharding's discard_gradients(), and repeat all micro-batches "
    "of the step"
)

INTEGERS = {2: torch.int16, 4: torch.int32}  # by bytes of a floating-point number, to compare bits


class Passes:
    """The passes of a root: while none runs, modules hold their shards.

    Between a forward pass and its backward pass they hold what FSDP2 gives them: a step of an
    optimizer made there raises InputError. With `accumulates`, whole gradients stay until a step's
    last backward pass.
    """

    def __init__(
        self,
        model: fsdp.FSDPModule,
        whole: "WholeWeights",
        *,
        accumulates: bool,
        calls_units: bool,
        use: GradientUse | None,
        copies: SecondaryCopies | None,
        scalars: ScalarGradients,
        gradients: Gradients,
    ) -> None:
        self._model, self._whole, self._use, self._copies = model, whole, use, copies
        self._scalars, self._gradients = scalars, gradients
        self._accumulates = accumulates
        self._units: list[fsdp.FSDPModule] = []
        self._incomplete = False
        self._depth = 0  # of calls of the model within its own forward
        self.has_called = False  # a method, whose output may get gradients
        self._uncalled = None if calls_units else fsdp.UncalledUnits(model)
        model.register_forward_pre_hook(self._enter, prepend=True)
        model.register_forward_hook(self._leave, always_call=True)  # after FSDP2's
        if self._uncalled:
            fsdp.call_methods_by(model, self._call)

    def add(self, units: Units) -> None:
        """Include units of the model, between two passes."""
        self._units += units
        if self._uncalled:
            self._uncalled.add(units)
        for unit in units:
            fsdp.show_between_passes(unit)
            fsdp.use_whole_parameters(unit)
        references = tuple(weakref.ref(unit) for unit in units)
        require = partial(_require_shards, references)
        fsdp.around_steps(register_optimizer_step_pre_hook, self._model, require)

    def require_complete(self) -> None:
        """Raise InputError if the last backward pass failed and its gradients are still there."""
        self.recover()
        if not self._incomplete:
            return
        if any(map(self._has_gradients, self._units)):
            raise InputError(INCOMPLETE)
        self.discard()

    def discard(self) -> None:
        """Clear all gradients, after which the next pass starts clean."""
        self.recover()
        for unit in self._units:
            fsdp.discard_gradients(unit)
            for shard in fsdp.shards(unit):
                self._gradients.clear(shard)
        for scalar in self._scalars.parameters():
            scalar.grad = None
            self._gradients.clear(scalar)
        self._incomplete = False

    def recover(self) -> None:
        """Let FSDP2 forget a pass that did not end."""
        if self._depth > 1 or not fsdp.is_in_pass(self._model):
            return
        self._incomplete = self._incomplete or fsdp.awaits_end_of_backward(self._model)
        fsdp.abandon_pass(self._model)
        if self._use is not None:
            self._use.discard()
        if self._copies is not None:
            self._copies.drop()  # ranks may have brought different ones up to date

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
            for unit in () if _needs_backward(output) else self._units:
                fsdp.show_shards(unit)
            self._whole.show()

    def _hide_whole(self) -> None:
        """Begin a pass as one after an evaluation: weights are gathered, modules hold shards."""
        if not torch.compiler.is_compiling():
            self._whole.hide(takes=torch.is_grad_enabled())

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
            output = method(*arguments, **options)
            self.has_called = self.has_called or _needs_backward(output)
            return output
        finally:
            self._leave(None, None, output, with_root=True)

    def _has_gradients(self, unit: fsdp.FSDPModule) -> bool:
        """Whether a unit has gradients, maybe of micro-batches that succeeded."""
        has_means = any(self._gradients.of(shard) is not None for shard in fsdp.shards(unit))
        return has_means or self._accumulates and fsdp.accumulates(unit)


def require_shards(parameters: Iterable[nn.Parameter]) -> None:
    """Raise InputError for parameters that are weights of some model, gathered for a pass."""
    if unique := dict.fromkeys(parameters):
        Notice(unique).step()


def _require_shards(references: Sequence[weakref.ref], optimizer: torch.optim.Optimizer) -> None:
    """Raise InputError for an optimizer or a notice that holds gathered weights of these units."""
    plain = [
        parameter
        for group in optimizer.param_groups
        for parameter in group["params"]
        if not isinstance(parameter, DTensor)
    ]
    if not plain:
        return
    units = [unit for reference in references if (unit := reference()) is not None]
    names: dict[nn.Parameter, str] = {}
    for unit in units:
        names |= fsdp.gathered_names(unit)
    for parameter in plain:
        if parameter in names:
            user = "GatheredParameters was given"
            if not isinstance(optimizer, Notice):
                user = "the optimizer holds"
            raise InputError(
                f"{user} {names[parameter]} as it was gathered for a pass, and changes of that "
                "would be lost: take the model's parameters before the forward pass, or after the "
                "backward pass, when they are its shards"
            )


def _needs_backward(output: Any) -> bool:
    """Whether gradients are enabled, and what a pass returns may have some."""
    leaves = pytree.tree_leaves(output)
    return torch.is_grad_enabled() and any(getattr(e, "requires_grad", True) for e in leaves)


class WholeWeights:
    """Keeps the weights of `units` of a root gathered between passes: by default, of none."""

    def __init__(
        self,
        root: fsdp.FSDPModule,
        gathers: Mapping[fsdp.Unit, WeightGather],
        kept: KeptWeights,
        gradients: Gradients,
    ) -> None:
        self._root, self._gathers, self._kept, self._gradients = root, gathers, kept, gradients
        self.units: list[fsdp.FSDPModule] = []

    def keep(self, units: Sequence[fsdp.FSDPModule]) -> None:
        """Keep all units, but those whose parameters are split over other axes, too."""
        self.units = [unit for unit in units if fsdp.keep_whole(unit)]
        if len(self.units) == len(units):
            fsdp.generate_alone(self._root)
        self._kept.trust(self.units, self._gradients.parameter_of)
        before = partial(_take_before, weakref.ref(self))
        fsdp.around_steps(register_optimizer_step_pre_hook, self._root, before)

    def gather(self) -> None:
        """Gather what is not gathered, and show it; all ranks call it, between two passes."""
        for unit in self.units:
            fsdp.gather_and_show(self._root, unit)

    def show(self) -> None:
        """Let modules hold the whole parameters of what is gathered."""
        for unit in self.units:
            fsdp.show_gathered(unit)

    def hide(self, *, takes: bool) -> None:
        """Let modules hold shards; with `takes`, these take what was written."""
        for unit in self.units:
            fsdp.adopt_whole(unit)
            fsdp.show_shards(unit)
        if takes:
            self.take()

    def may_step(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether a step of an optimizer changes the masters of what is gathered."""
        return not isinstance(optimizer, Notice) and self._kept.may_step(optimizer)

    @torch.no_grad()
    def take(self, only: nn.Parameter | None = None) -> None:
        """Let the shards, or `only` one of them, take what was written to gathered weights."""
        flags, units = [], []
        for unit in filter(fsdp.is_gathered, self.units):
            fsdp.adopt_whole(unit)
            if self._kept.was_written(unit):
                continue  # the shards are newer
            for rows, expected in self._expected(unit, only):
                flags.append(_differs(rows.gathered, expected).any())
                units.append(unit)
        if not flags:
            return
        written = [u for u, flag in zip(units, torch.stack(flags).tolist(), strict=True) if flag]
        for unit in dict.fromkeys(written):
            self._take_into(unit, only)

    def _take_into(self, unit: fsdp.FSDPModule, only: nn.Parameter | None) -> None:
        where: dict[torch.Tensor, torch.Tensor] = {}
        for rows, expected in self._expected(unit, only):
            shard = rows.local.to(rows.gathered.device)
            # With qwZ, these rows may be exact since they were written before.
            exact = _differs(rows.gathered, shard.to(expected.dtype))
            differs = _differs(rows.gathered, expected) & exact
            if differs.any():
                rows.local.copy_(torch.where(differs, rows.gathered.to(shard.dtype), shard))
                where[rows.shard] = differs
                rows.gathered.copy_(rows.local)  # the codes of what was not written change, too
        if where:
            notify_weights_written(where, gathered=True, where=where)

    def _expected(
        self, unit: fsdp.FSDPModule, only: nn.Parameter | None
    ) -> Iterator[tuple[fsdp.OwnRows, torch.Tensor]]:
        """Yield this rank's rows of each parameter, and what a gather makes of the shard."""
        gather = self._gathers.get(unit)
        every = [*fsdp.own_rows(unit)]
        sent: list[torch.Tensor] = []
        if gather is not None and gather.quantizes:
            flat = torch.cat([_as_sent(rows) for rows in every])
            sent = [*gather.rounded(flat).split([rows.padded.numel() for rows in every])]
        for index, rows in enumerate(every):
            if only is None or rows.shard is only:
                values = sent[index] if sent else _as_sent(rows)
                yield rows, values[: rows.local.numel()].view(rows.local.shape)


def _take_before(whole: weakref.ref[WholeWeights], optimizer: torch.optim.Optimizer) -> None:
    if (alive := whole()) is not None and alive.may_step(optimizer):
        alive.take()


def _as_sent(rows: fsdp.OwnRows) -> torch.Tensor:
    return rows.padded.to(rows.gathered.device, rows.gathered.dtype)


def _differs(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    integers = INTEGERS[one.element_size()]
    return one.view(integers) != other.view(integers)
