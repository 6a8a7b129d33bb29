"""How many copies of a token cross nodes to experts, which m nodes split.

Each choice of K of the E experts is as likely as any other, which balance gives on average.
"""

from math import comb


def copies_across_nodes(num_experts: int, topk: int, num_nodes: int) -> float:
    """Return how many other nodes have experts of a token: (m - 1) (1 - C(E - E/m, K) / C(E, K)).

    The fraction is how often all K experts are among those of the other nodes. A router that
    chooses groups of experts first needs fewer.
    """
    elsewhere = comb(num_experts - num_experts // num_nodes, topk)
    return (num_nodes - 1) * (1 - elsewhere / comb(num_experts, topk))
