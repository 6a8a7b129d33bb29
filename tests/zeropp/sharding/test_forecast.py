"""The forecast of the traffic, for shapes whose bytes can be counted by hand."""

import pytest
import torch

from zeropp.fsdp_adapter import Piece
from zeropp.sharding.forecast import Forecast
from zeropp.wire.route import Nodes, Route

BLOCK, ROOT = 3 * 256, 256  # elements of a rank's shard


def forecast_of(nodes: Nodes, inner: int, **settings: object) -> Forecast:
    """Two blocks and a root, each of one matrix, in bf16."""
    units = tuple(
        (Piece(elements=size, row=size, ndim=2, trainable=True),) for size in (BLOCK, BLOCK, ROOT)
    )
    route = Route(nodes=nodes, inner=inner, **settings)
    means = Route(nodes=nodes, inner=nodes.ranks_per_node, bits=(8, 4))
    wire = {"compute_dtype": torch.bfloat16, "wire_dtype": torch.bfloat16}
    return Forecast(
        stage=3,
        reduces_once=False,
        keeps_roots=False,
        units=units,
        weights=route,
        gradients=means,
        **wire,
    )


def bytes_across_nodes(sent: dict) -> float:
    return sum(num_bytes for (_, hop), num_bytes in sent.items() if hop == "across_nodes")


@pytest.mark.parametrize("num_micro_batches", [1, 3])
def test_plain_zero_3_is_three_rings_in_16_bit(num_micro_batches):
    nodes = Nodes(num_ranks=8, ranks_per_node=2)
    plain = forecast_of(nodes, 2, bits=(8, 8), keeps=True).plain()
    # A ring over 8 ranks passes 7 shards over each of its links; one link leaves each node.
    # Blocks: gathered twice, reduced once; root: gathered once, reduced once. 2 bytes each.
    link = 7 * 2 * (2 * 3 * BLOCK + 2 * ROOT) * num_micro_batches
    sent = plain.node(num_micro_batches)
    assert bytes_across_nodes(sent) == link
    assert sum(sent.values()) == 2 * link  # the other of a node's two links stays inside


def test_a_node_is_the_mean_of_all_nodes_where_hops_straddle_them():
    nodes = Nodes(num_ranks=6, ranks_per_node=2)
    forecast = forecast_of(nodes, 3, bits=(8, 8), keeps=True)  # groups 0-2 and 3-5, nodes of two
    by_rank = [forecast.rank(position) for position in range(6)]
    by_node = [
        bytes_across_nodes(by_rank[n]) + bytes_across_nodes(by_rank[n + 1]) for n in (0, 2, 4)
    ]
    assert len(set(by_node)) > 1
    assert bytes_across_nodes(forecast.node()) == sum(by_node) / 3
