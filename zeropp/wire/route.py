"""The routes of weights and gradients through the ranks: which hops, how many bits, what is kept.

Ranks have positions on the data axis, node after node. A route has an inner hop, among `inner`
consecutive ranks, and an outer hop, among ranks with the same index in their inner groups. A hop of
one rank is skipped. Nothing here communicates: collectives are built from routes, and so is the
forecast of the bytes they send.
"""

import logging
from dataclasses import dataclass, replace

from zeropp.errors import InputError
from zeropp.settings.zero_config import ZeroConfig
from zeropp.wire.rank_group import Nodes, RankGroup, everyone
from zeropp.wire.traffic import Coding

log = logging.getLogger("zeropp")

UNQUANTIZED = 16
_NO_COPY = "a copy sharded over all ranks would equal the shards, so none is kept"


@dataclass(frozen=True, kw_only=True)
class Route:
    """Two hops over all ranks: one among `inner` ranks, one among `outer` = ranks / inner.

    `bits` is (inner hop, outer hop); 16 means unquantized. With `keeps`, what arrives by the outer
    hop is kept for later gathers: hpZ's secondary copy. With `updates`, what is kept is brought up
    to date after an optimizer's step: scales stay, so that codes change little. `is_coded` says
    whether messages of the outer hop are coded to their entropy; None: where steps are faster so.
    """

    nodes: Nodes
    inner: int
    bits: tuple[int, int] = (UNQUANTIZED, UNQUANTIZED)
    keeps: bool = False
    updates: bool = False
    is_coded: bool | None = False

    @property
    def outer(self) -> int:
        return self.nodes.num_ranks // self.inner

    @property
    def is_flat(self) -> bool:
        """Whether all ranks exchange data in one unquantized collective."""
        return self.outer == 1 and self.bits[0] == UNQUANTIZED

    @property
    def coding(self) -> Coding:
        """How training begins, coded if there is a choice: that costs less where it is wrong."""
        is_tried = self.is_coded is None and self.nodes.machines > 1
        return Coding(bool(self.is_coded) or is_tried, is_tried)

    def inner_hop(self, position: int) -> RankGroup:
        """Return the group of the inner hop, planned, as the rank at `position` sees it."""
        return everyone(self.nodes, position).consecutive(self.inner)

    def outer_hop(self, position: int) -> RankGroup:
        """Return the group of the outer hop, as `inner_hop` does that of the inner one."""
        return everyone(self.nodes, position).strided(self.inner)


def require_fit(config: ZeroConfig, nodes: Nodes) -> None:
    """Raise InputError for an hpZ partition that does not divide the ranks.

    For programs that check before they build anything; `weight_route` calls it by itself.
    """
    size, parts = config.zero_optimization.zero_hpz_partition_size, nodes.parts
    if 1 < size and size % parts:
        raise InputError(
            f"zero_optimization.zero_hpz_partition_size = {size} counts the ranks of a node, and "
            f"{parts} of them hold parts of each weight: use {nodes.ranks_per_node * parts}, the "
            f"ranks of one node, or another multiple of {parts}"
        )
    size //= parts
    if 1 < size <= nodes.num_ranks and nodes.num_ranks % size:
        raise InputError(
            f"zero_optimization.zero_hpz_partition_size = {size} does not divide the "
            f"{nodes.num_ranks} ranks: use the ranks of one node, {nodes.ranks_per_node}, "
            "or another divisor"
        )


def weight_route(config: ZeroConfig, nodes: Nodes) -> Route:
    """Return how weights are gathered: outer hop, then inner hop; flat if nothing needs two hops.

    Raises InputError for an hpZ partition that does not divide the ranks.
    """
    require_fit(config, nodes)
    quantized = config.zero_optimization.zero_quantized_weights
    bits = config.zeropp.weight_bits if quantized else UNQUANTIZED
    partition = _secondary_partition(config.zero_optimization.zero_hpz_partition_size, nodes)
    inner = partition or (nodes.ranks_per_node if quantized else nodes.num_ranks)
    keeps = partition is not None and partition < nodes.num_ranks
    route = Route(nodes=nodes, inner=inner, bits=(bits, bits), keeps=keeps)
    if not (keeps and config.updates_copies):
        return route
    return replace(route, updates=True, is_coded=config.zeropp.code_messages)


def gradient_route(config: ZeroConfig, nodes: Nodes) -> Route:
    """Return how gradients are averaged: inner hop, then outer hop."""
    wanted, in_node = config.zeropp.ranks_per_node, nodes.ranks_per_node * nodes.parts
    if wanted is not None and wanted > in_node:
        log.info(
            "zeropp.ranks_per_node = %d exceeds the number of ranks, %d: all ranks form one node",
            wanted,
            in_node,
        )
    quantized = config.zero_optimization.zero_quantized_gradients
    bits = config.zeropp.gradient_bits if quantized else (UNQUANTIZED, UNQUANTIZED)
    route = Route(nodes=nodes, inner=nodes.ranks_per_node, bits=bits)
    if bits[1] == UNQUANTIZED:
        return route
    return replace(route, is_coded=config.zeropp.code_messages)


def _secondary_partition(size: int, nodes: Nodes) -> int | None:
    """Return how many ranks of the data axis share one secondary copy; None if there is none.

    The setting, `size`, counts all ranks of a node. With as many parts of the model in a node as it
    has ranks, each of them keeps a copy of its own part.
    """
    if size == 1:
        return None
    partition, most = size // nodes.parts, nodes.num_ranks
    if partition > most:
        log.info(
            "zero_hpz_partition_size = %d exceeds the number of ranks, %d: using the %d ranks of "
            "one node%s",
            size,
            most * nodes.parts,
            nodes.ranks_per_node * nodes.parts,
            f"; {_NO_COPY}" if nodes.count == 1 else "",
        )
        return nodes.ranks_per_node
    if partition == most > 1:
        log.info("zero_hpz_partition_size = %d covers all ranks: %s", size, _NO_COPY)
    return partition
