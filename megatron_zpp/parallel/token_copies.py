"""How many copies of a token cross nodes to experts, and with how many tokens that is worth it.

Both assume that each choice of K of the E experts is as likely as any other, which balance gives on
average. m nodes split the experts.
"""

from math import comb


def copies_across_nodes(num_experts: int, topk: int, num_nodes: int) -> float:
    """Return how many other nodes have experts of a token: (m - 1) (1 - C(E - E/m, K) / C(E, K)).

    The fraction is how often all K experts are among those of the other nodes. A router that
    chooses groups of experts first needs fewer.
    """
    elsewhere = comb(num_experts - num_experts // num_nodes, topk)
    return (num_nodes - 1) * (1 - elsewhere / comb(num_experts, topk))


def copies_for_each_expert(topk: int, num_nodes: int) -> float:
    """Return how many experts of a token other nodes have: K (m - 1) / m."""
    return topk * (num_nodes - 1) / num_nodes


def break_even_tokens(
    *,
    expert_weights: int,
    bytes_per_weight: float,
    hidden_size: int,
    num_nodes: int,
    copies: float,
    bytes_per_channel: float = 8,
) -> float:
    """Return how many tokens of a node in a step take the bytes that their experts would.

    With fewer, experts split over m nodes send fewer bytes; with more, experts split in a node do.
    Both move a node's bytes per step away from 1 / m of the experts' weights, so that the number
    of nodes that have the same experts does not matter:

        T* = (1 - 1/m) · weights · bytes_per_weight / (bytes_per_channel · H · copies)

    expert_weights: of a layer. bytes_per_weight: sent for each in a step with experts in the node,
    2 (q + 0.258 g) in docs/moe.md. copies: of a token that cross in one move, as one of the
    functions above returns it. bytes_per_channel: of the moves of a step together, 8 for four in 16
    bit, 6 with INT8 towards experts, 12 with full recomputation.
    """
    saved = (1 - 1 / num_nodes) * expert_weights * bytes_per_weight
    return saved / (bytes_per_channel * hidden_size * copies)
