"""`Sharding`: what `zeropp.shard` made of a model, and how a step must treat it."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn

from zeropp import fsdp_adapter as fsdp
from zeropp.collectives import SecondaryCopies
from zeropp.forecast import REDUCED_WHOLE, Forecast
from zeropp.route import UNQUANTIZED, Hop, Route
from zeropp.traffic import HOPS, Traffic


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """A sharded model: its units, its ledger, and the weights' secondary copies under hpZ."""

    model: nn.Module
    stage: int
    num_ranks: int
    compute_dtype: torch.dtype
    units: tuple[fsdp.FSDPModule, ...] = ()  # the blocks in forward order, then the root
    group: dist.ProcessGroup | None = field(default=None, repr=False)
    forecast: Forecast | None = field(default=None, repr=False)
    traffic: Traffic = field(default_factory=Traffic, repr=False)
    copies: SecondaryCopies | None = field(default=None, repr=False)

    @property
    def shards_gradients(self) -> bool:
        """Whether each rank holds a different slice of the averaged gradients."""
        return self.stage >= 1 and self.num_ranks > 1

    @contextmanager
    def micro_step(self, *, last: bool) -> Iterator[None]:
        """Around one micro-batch's forward and backward; `last` is the step's last one."""
        self.begin_micro_step(last=last)
        yield

    def begin_micro_step(self, *, last: bool) -> None:
        """Before a micro-batch's forward: what its backward will do with weights and gradients."""
        for unit in self.units:
            unit.set_requires_gradient_sync(last or self.stage >= 2, recurse=False)
            unit.set_reshard_after_backward(last or self.stage == 3, recurse=False)

    def release(self) -> None:
        """Free weights that forward-only passes left gathered (evaluation, generation)."""
        for unit in self.units:
            unit.reshard()

    def weights_changed(self) -> None:
        """Forget every secondary copy: the shards hold other weights than were gathered (hpZ).

        Optimizers of torch.optim and `load_state_dict` give this notice by themselves; whoever
        writes into the shards by other means gives it, on every rank.
        """
        if self.copies:
            self.copies.drop()

    def expected_traffic(self, num_micro_batches: int = 1) -> dict[tuple[str, str], int]:
        """Bytes that this rank will send per step, by (purpose, hop); empty for one rank."""
        if self.forecast is None:
            return {}
        return self.forecast.rank(dist.get_rank(self.group), num_micro_batches)

    def describe(self, num_micro_batches: int = 1) -> tuple[tuple[str, str], ...]:
        """Rows (what, how): the collectives as they will run, and the bytes a node will send."""
        forecast = self.forecast
        if forecast is None:
            return (("collectives", "none: one rank"),)
        if self.stage == 0:
            width = f"{8 * REDUCED_WHOLE.itemsize} bit among {self.num_ranks} ranks"
            rows = [("gradients", f"all-reduce, {width}")]
        else:
            weights = _hops(forecast.weights, self.compute_dtype, ("outer", "inner"))
            means = _hops(forecast.gradients, forecast.wire_dtype, ("inner", "outer"))
            kept = "; kept in the node until the weights change (hpZ)" if self.copies else ""
            rows = [
                ("weights", f"all-gather, {weights}{kept}"),
                ("gradients", f"all-to-all, {means}; summed in fp32"),
            ]
        sent = forecast.node(num_micro_batches)
        far, near = (
            sum(sent[key] for key in sent if key[1] == hop) / 2**20 for hop in reversed(HOPS)
        )
        total = f"{far:.2f} MiB to other nodes, {near:.2f} MiB within"
        return (*rows, ("a node sends per step", total))


def _hops(route: Route, wire: torch.dtype, order: tuple[str, str]) -> str:
    """The hops of a route that happen, in words."""
    widths = {"inner": route.bits[0], "outer": route.bits[1]}
    hops = {"inner": route.inner_hop(0), "outer": route.outer_hop(0)}
    words = []
    for name in order:
        if hops[name].size > 1:
            bits = widths[name]
            width = f"{8 * wire.itemsize} bit" if bits == UNQUANTIZED else f"INT{bits}"
            words.append(f"{width} among {hops[name].size} ranks {_where(hops[name])}")
    return " then ".join(words)


def _where(hop: Hop) -> str:
    near = sum(hop.nodes.same(hop.members[0], other) for other in hop.members)
    if near == hop.size:
        return "of a node"
    return "across nodes" if near == 1 else "in and across nodes"
