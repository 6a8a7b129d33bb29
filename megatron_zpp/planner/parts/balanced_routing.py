"""Tokens that all experts get equally many of, for passes on tensors without values.

What a router decides is not known before a run. Here tokens choose their experts by random
permutations: each expert is as often chosen as the others, and each choice of K of E experts is as
likely as any other. The numbers of rows that follow from that are computed, and only rows have no
values.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.utils._python_dispatch import _disable_current_modes

from megatron_zpp.capabilities.experts.routing_record import Assignment, RoutingRecord
from megatron_zpp.settings.config import ModelConfig

SEED = 1


@dataclass(kw_only=True)
class BalancedRouting(RoutingRecord):
    """A record whose assignments are balanced, of `num_tokens` that a rank has in a micro-batch."""

    num_tokens: int
    config: ModelConfig

    def assignment(self, layer: int, assign: Callable[[], Assignment]) -> Assignment:
        """Return an assignment in place of what a router would decide."""
        return super().assignment(layer, self._balanced)

    def _balanced(self) -> Assignment:
        num_experts, topk = self.config.num_experts, self.config.moe_router_topk
        num_pairs = self.num_tokens * topk
        with _disable_current_modes():
            generator = torch.Generator().manual_seed(SEED)
            rounds = -(-num_pairs // num_experts)
            permutations = torch.rand(rounds, num_experts, generator=generator).argsort(1)
            flat = permutations.flatten()[:num_pairs].contiguous()
        ordered, order = flat.sort(stable=True)
        counts = torch.bincount(flat, minlength=num_experts)
        capacity = self._capacity(num_pairs)
        if capacity < int(counts.max()):
            first = counts.cumsum(0) - counts
            order = order[torch.arange(num_pairs) - first[ordered] < capacity]
            counts = counts.clamp(max=capacity)
        return Assignment(experts=flat.view(-1, topk), order=order, counts=counts)

    def _capacity(self, num_pairs: int) -> int:
        """Return how many rows an expert takes at most."""
        factor = self.config.capacity_factor(training=True)
        if factor is None:
            return num_pairs
        even = math.ceil(num_pairs / self.config.num_experts * factor)
        return max(even, self.config.moe_min_capacity)


def assumption(config: ModelConfig) -> str:
    """Return a line that says that routing is taken to be balanced, if there is any."""
    return "\nif all experts get equally many tokens" if config.has_experts else ""
