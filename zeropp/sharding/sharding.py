"""`Sharding`: the result of `zeropp.shard`, and what a training step must do with it."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from zeropp import fsdp_adapter as fsdp
from zeropp.ranks.groups import close_groups
from zeropp.sharding.failed_pass import FailedPasses
from zeropp.sharding.forecast import REDUCED_WHOLE, Forecast
from zeropp.sharding.grid import Grid
from zeropp.sharding.weight_changes import WeightChanges
from zeropp.wire.frozen_weights import require_frozen
from zeropp.wire.gradient_use import GradientUse
from zeropp.wire.route import UNQUANTIZED, Hop, Route
from zeropp.wire.scalar_gradients import ScalarGradients
from zeropp.wire.secondary_copies import SecondaryCopies
from zeropp.wire.traffic import Sent, Traffic
from zeropp.wire.weight_steps import StepCounts

MIB = 2**20
COLUMNS = MappingProxyType({"across_nodes": "across nodes", "in_node": "in node"})


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """A sharded model: its units, its ledger, and the weights' secondary copies under hpZ."""

    model: nn.Module
    grid: Grid = field(repr=False)
    stage: int
    num_ranks: int
    compute_dtype: torch.dtype
    units: tuple[fsdp.FSDPModule, ...] = ()  # the blocks in forward order, then the root
    group: dist.ProcessGroup | None = field(default=None, repr=False)
    forecast: Forecast | None = field(default=None, repr=False)
    traffic: Traffic = field(default_factory=Traffic, repr=False)
    copies: SecondaryCopies | None = field(default=None, repr=False)
    gradient_use: GradientUse | None = field(default=None, repr=False)
    weight_changes: WeightChanges | None = field(default=None, repr=False)
    failed_passes: FailedPasses | None = field(default=None, repr=False)
    scalars: ScalarGradients | None = field(default=None, repr=False)
    reduces_once: bool = True  # gradients, in a step; whole ones are accumulated until then
    keeps_root: bool = True  # gathered during a step, also at stage 3
    stores_frozen: bool = False  # frozen weights are stored quantized and cannot be trained
    parts: tuple["Sharding", ...] = ()  # if this is several models in one: see `joined.py`

    @property
    def shards_gradients(self) -> bool:
        """Whether each rank holds a different slice of the averaged gradients."""
        return self.stage >= 1 and self.num_ranks > 1

    @contextmanager
    def micro_step(self, *, last: bool) -> Iterator[None]:
        """Enclose one micro-batch's forward and backward; `last` marks the last one of a step."""
        self.begin_micro_step(last=last)
        yield

    def begin_micro_step(self, *, last: bool) -> None:
        """Set what the next backward does with weights and gradients; call before its forward."""
        if self.stores_frozen:
            require_frozen(self.model)
        if self.scalars is not None:
            self.scalars.is_due = last
        for unit in self.units:
            fsdp.set_gradient_dtypes(unit)
            unit.set_requires_gradient_sync(last or not self.reduces_once, recurse=False)
            stays = self.stage < 3 or self.keeps_root and unit is self.model
            unit.set_reshard_after_backward(last or not stays, recurse=False)

    def discard_gradients(self, set_to_none: bool = True) -> None:
        """Clear all gradients of a step, to begin it again; an optimizer clears only its own.

        Until the last micro-batch of a step, whole gradients may be accumulated that no parameter
        holds as `.grad`.
        """
        self.model.zero_grad(set_to_none)
        if self.failed_passes is not None and set_to_none:
            self.failed_passes.discard()
            return
        for unit in self.units:
            fsdp.discard_gradients(unit, set_to_none)

    def require_complete_gradients(self) -> None:
        """Raise InputError if a backward pass failed and left gradients of a part of the model."""
        if self.failed_passes is not None:
            self.failed_passes.require_complete()

    def require_same_order(self) -> None:
        """Raise InputError if the ranks reduced different units in the last backward pass.

        On GPUs this is noticed in the next pass otherwise. All ranks call it, and the host waits
        until that pass has ended.
        """
        if self.gradient_use is not None:
            self.gradient_use.require_same_order()

    def release(self) -> None:
        """Free weights that forward-only passes, or one that failed, left gathered."""
        if self.failed_passes is not None and fsdp.backward_id() == -1:
            self.failed_passes.recover()
        for unit in self.units:
            fsdp.free_gathered(unit)

    def weights_changed(self) -> None:
        """Drop gathered weights, hpZ's copies included, because the shards have changed.

        Steps of torch.optim optimizers, `load_state_dict` and writes in place that raise a tensor's
        version do this by themselves. Call it on every rank after writing into the shards by other
        means.
        """
        if self.weight_changes is not None:
            self.weight_changes.drop()

    def close_groups(self) -> None:
        """Close the process groups that this model shares with all others on its mesh.

        All ranks of the mesh call it. None of these models can be used afterwards; models that are
        sharded later get new groups. `torch.distributed.destroy_process_group()` closes them too.
        """
        if self.group is not None:
            close_groups(dist.get_process_group_ranks(self.group))

    def num_copies(self, parameter: torch.Tensor) -> int:
        """Return on how many ranks a part of a parameter is, of those whose parts are added up."""
        is_on_all = self.shards_gradients and not isinstance(parameter, DTensor)
        return self.grid.num_copies(parameter) * (self.num_ranks if is_on_all else 1)

    def expected_traffic(self, num_micro_batches: int = 1) -> dict[tuple[str, str], int]:
        """Return the bytes this rank sends per step, by (purpose, hop); empty for one rank."""
        if self.forecast is None:
            return {}
        return self.forecast.rank(dist.get_rank(self.group), num_micro_batches)

    def plain_traffic(self, num_micro_batches: int = 1) -> dict[tuple[str, str], int]:
        """Return `expected_traffic` of the same stage under plain FSDP2, to compare with."""
        if self.forecast is None:
            return {}
        return self.forecast.plain().rank(dist.get_rank(self.group), num_micro_batches)

    def last_weight_steps(self) -> StepCounts:
        """Return what the last messages that moved codes held; zeros without such messages."""
        has_steps = self.copies is not None and self.copies.steps is not None
        return self.copies.steps.last_counts() if has_steps else StepCounts()

    def describe(
        self, num_micro_batches: int = 1, sent: Sent | None = None
    ) -> tuple[tuple[str, str], ...]:
        """Return table rows (name, text): the collectives as they run, and the bytes a node sends.

        A text may have several lines. `sent` are the bytes of a node where others are to be shown
        than the forecast's, which does not know what is sent besides weights and gradients.
        """
        forecast = self.forecast
        if forecast is None:
            alone = ("collectives", "none: one rank" + (" of the data axis" if sent else ""))
            return (alone, ("sends", _table(sent))) if sent else (alone,)
        nodes = forecast.weights.nodes
        if self.stage == 0:
            width = f"{8 * REDUCED_WHOLE.itemsize} bit among {self.num_ranks} ranks"
            rows = [("gradients", f"all-reduce, {width}")]
        else:
            weights = _hops(forecast.weights, self.compute_dtype, ("outer", "inner"))
            means = _hops(forecast.gradients, forecast.wire_dtype, ("inner", "outer"))
            more = "\nfrozen matrices as they are stored, as codes" if self.stores_frozen else ""
            more += "\nkept in each node until the weights change (hpZ)" if self.copies else ""
            if reach := forecast.weights.step_reach:
                levels = self.copies.steps.fixed and f"{2 * reach + 1} levels"
                more += f"\nthen across nodes as steps of the codes, {levels or '3, 5 or 9 levels'}"
            rows = [
                ("weights", f"all-gather, {weights}{more}"),
                ("gradients", f"all-to-all, {means}\nsummed in fp32, whatever the wire carries"),
            ]
        table = _table(sent or forecast.node(num_micro_batches))
        size = nodes.ranks_per_node * nodes.parts
        return (("nodes", f"{nodes.count} of {size} ranks"), *rows, ("sends", table))


def _hops(route: Route, wire: torch.dtype, order: tuple[str, str]) -> str:
    """Describe the hops of a route, without those of one rank."""
    widths = {"inner": route.bits[0], "outer": route.bits[1]}
    hops = {"inner": route.inner_hop(0), "outer": route.outer_hop(0)}
    words = []
    for name in order:
        if hops[name].size > 1:
            bits = widths[name]
            width = f"{8 * wire.itemsize} bit" if bits == UNQUANTIZED else f"INT{bits}"
            members = f"{hops[name].size}" if words else f"{hops[name].size} ranks"
            words.append(f"{width} among {members} {_where(hops[name])}")
    return ", then ".join(words)


def _table(sent: Sent) -> str:
    """Format MiB by purpose with a column per hop; purposes that send nothing are left out."""
    purposes = dict.fromkeys(purpose for purpose, _ in sent)
    sums = {purpose: [sent[purpose, hop] for hop in COLUMNS] for purpose in purposes}
    sums["total"] = [sum(column) for column in zip(*sums.values(), strict=True)]
    lines = ["MiB per node and step" + "".join(f"{COLUMNS[hop]:>14}" for hop in COLUMNS)]
    for name, row in sums.items():
        if any(row):
            cells = "".join(f"{num_bytes / MIB:14.2f}" for num_bytes in row)
            lines.append(f"{name.replace('_', ' '):<21}{cells}")
    return "\n".join(lines)


def _where(hop: Hop) -> str:
    near = sum(hop.nodes.same(hop.members[0], other) for other in hop.members)
    if near == hop.size:
        return "of a node"
    return "across nodes" if near == 1 else "in and across nodes"
