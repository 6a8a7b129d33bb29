"""The bytes a step will send, computed from routes and shapes before anything is sent.

The ledger (`zeropp.wire.traffic`) counts what was sent, and tests compare the two. Gathers per step
of n micro-batches: at stage 3 each block once in forward and once in backward of every micro-batch,
the root once for both; at stages 1 and 2 every unit once. Where hpZ keeps a copy, only the first
gather of a step has an outer hop. With steps of codes that is the message of a step that follows
others, with as many levels as may be needed; one that also compares the copies, by default every
1000th, sends `CHECK_BYTES` more for each unit, which are not counted. Gradients are averaged once
per micro-batch, at stages 0 and 1 once per step. With `reduces_once` they are at stages 2 and 3
too. With `keeps_roots` the root is gathered once per step at stage 3, too.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import cached_property
from math import lcm

import torch

from zeropp.fsdp_adapter import Piece
from zeropp.quant.code_steps import step_layout
from zeropp.wire.collectives import gradient_layouts, weight_layout
from zeropp.wire.route import Hop, Route
from zeropp.wire.traffic import HOPS, PURPOSES

REDUCED_WHOLE = torch.float32  # the dtype in which stage 0 all-reduces


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """The bytes of one step: `units` are the pieces of each block in order, then of the root.

    `roots` are the indices of roots in `units`, of which several sharded models have several.
    """

    stage: int
    reduces_once: bool  # gradients, in a step
    keeps_roots: bool  # gathered during a step
    units: tuple[tuple[Piece, ...], ...]
    weights: Route
    gradients: Route
    compute_dtype: torch.dtype
    wire_dtype: torch.dtype
    roots: tuple[int, ...] = (-1,)

    def rank(self, position: int, num_micro_batches: int = 1) -> dict[tuple[str, str], int]:
        """Return the bytes that the rank at `position` sends per step, by (purpose, hop)."""
        sent: Counter[tuple[str, str]] = Counter()
        for (pieces, is_root), count in self._distinct_units.items():
            for purpose, by_hop in self._unit(pieces, is_root, position, num_micro_batches):
                for hop, num_bytes in by_hop.items():
                    sent[purpose, hop] += count * num_bytes
        return {(purpose, hop): sent[purpose, hop] for purpose in PURPOSES for hop in HOPS}

    def node(self, num_micro_batches: int = 1) -> dict[tuple[str, str], float]:
        """Return the bytes that a node's ranks send per step, by (purpose, hop): the mean over
        nodes.

        Nodes differ only if hops begin in the middle of a node; the pattern repeats after `period`
        ranks.
        """
        per_node, inner = self.weights.nodes.ranks_per_node, self.weights.inner
        period = per_node if inner % per_node == 0 else lcm(per_node, inner)
        total: Counter[tuple[str, str]] = Counter()
        for position in range(period):
            total.update(self.rank(position, num_micro_batches))
        in_node = per_node * self.weights.nodes.parts
        return {key: sent * in_node / period for key, sent in total.items()}

    def plain(self) -> "PlainForecast":
        """Return the forecast of the same stage and shapes under plain FSDP2."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        nodes = self.weights.nodes
        flat = Route(nodes=nodes, inner=nodes.num_ranks)
        units = tuple(
            tuple(replace(piece, packed_bytes=0) for piece in pieces) for pieces in self.units
        )
        return PlainForecast(**values | {"weights": flat, "gradients": flat, "units": units})

    @cached_property
    def _distinct_units(self) -> Counter[tuple[tuple[Piece, ...], bool]]:
        """How many units there are of each kind: pieces, and whether they are a root's."""
        roots = {root % len(self.units) for root in self.roots}
        return Counter((pieces, index in roots) for index, pieces in enumerate(self.units))

    def _unit(
        self, pieces: tuple[Piece, ...], is_root: bool, position: int, num_micro_batches: int
    ) -> Iterator[tuple[str, dict[str, int]]]:
        if self.stage == 0:
            yield "gradients", self._all_reduce(pieces, position)
            return
        regathers = self.stage == 3 and not (is_root and self.keeps_roots)
        forward = num_micro_batches if regathers else 1
        backward = num_micro_batches if self.stage == 3 and not is_root else 0
        means = 1 if self.reduces_once else num_micro_batches
        for times, purpose in ((forward, "weights_forward"), (backward, "weights_backward")):
            first = 1 if purpose == "weights_forward" else 0
            yield purpose, self._gather(pieces, position, times, first)
        trainable = tuple(piece for piece in pieces if piece.trainable)
        yield "gradients", self._mean(trainable, position, means)

    def _gather(
        self, pieces: tuple[Piece, ...], position: int, times: int, first: int
    ) -> dict[str, int]:
        route, sent = self.weights, Counter()
        dtype = next((piece.dtype for piece in pieces if piece.dtype), self.compute_dtype)
        row = weight_layout(pieces, route, dtype).packed_bytes
        if route.is_flat or any(piece.packed_bytes for piece in pieces):
            width = dtype.itemsize
            row = sum(piece.packed_bytes or width * piece.elements for piece in pieces)
        if route.outer > 1:
            crossings, crossing = first if route.keeps else times, row
            if route.step_reach:
                layout = weight_layout(pieces, route, dtype)
                crossing = step_layout(layout, route.step_reach).num_bytes
            if route.keeps and not any(piece.trainable for piece in pieces):
                crossings = 0  # these weights never change: they cross once in the whole run
            _add(sent, route.outer_hop(position).gather_bytes(position, crossing), crossings)
        if route.inner > 1:
            arrived = row * route.outer
            _add(sent, route.inner_hop(position).gather_bytes(position, arrived), times)
        return sent

    def _mean(self, pieces: tuple[Piece, ...], position: int, times: int) -> dict[str, int]:
        route, sent = self.gradients, Counter()
        inner, outer = gradient_layouts(pieces, route, self.wire_dtype)
        if route.inner > 1:
            part = inner.packed_bytes * route.outer
            _add(sent, route.inner_hop(position).exchange_bytes(position, part), times)
        if route.outer > 1:
            part = outer.packed_bytes
            _add(sent, route.outer_hop(position).exchange_bytes(position, part), times)
        return sent

    def _all_reduce(self, pieces: tuple[Piece, ...], position: int) -> dict[str, int]:
        """Count a ring all-reduce: it passes each rank's share of the buffer around twice."""
        nodes = self.weights.nodes
        elements = sum(piece.elements for piece in pieces if piece.trainable)
        whole = elements * REDUCED_WHOLE.itemsize
        everyone = Hop(members=tuple(range(nodes.num_ranks)), nodes=nodes)
        return everyone.gather_bytes(position, round(2 * whole / nodes.num_ranks))


@dataclass(frozen=True, kw_only=True)
class PlainForecast(Forecast):
    """ZeRO under plain FSDP2: nothing quantized, each collective one ring over all ranks."""

    def _mean(self, pieces: tuple[Piece, ...], position: int, times: int) -> dict[str, int]:
        """Count a ring reduce-scatter, which sends as many slices as an all-gather sends shards."""
        row = sum(piece.elements for piece in pieces) * self.wire_dtype.itemsize
        sent: Counter[str] = Counter()
        _add(sent, self.weights.inner_hop(position).gather_bytes(position, row), times)
        return sent


def _add(total: Counter, by_hop: dict[str, int], times: int) -> None:
    for hop, num_bytes in by_hop.items():
        total[hop] += times * num_bytes
