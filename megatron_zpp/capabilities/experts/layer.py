"""The layer of experts that takes the place of a block's MLP (Shazeer et al. 2017).

x has a rank's rows where rows are split. Shapes: B batch, S sequence, H hidden, T = B S tokens,
E experts, K experts of a token, M pairs of a token and an expert.
"""

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_zpp.capabilities.experts.auxiliary_losses import AuxiliaryLosses
from megatron_zpp.capabilities.experts.axis import axis_of
from megatron_zpp.capabilities.experts.experts import Experts
from megatron_zpp.capabilities.experts.messages import token_messages
from megatron_zpp.capabilities.experts.relay import return_sums, send_copies
from megatron_zpp.capabilities.experts.router import Router
from megatron_zpp.capabilities.experts.routing_record import Assignment
from megatron_zpp.model.attention.sequences import WHOLE_ROWS, Sequences
from megatron_zpp.model.mlp import MLP, FeedForward
from megatron_zpp.model.part import WHOLE, Part
from megatron_zpp.recipe.activation_forecast import Forecast
from megatron_zpp.settings.config import ModelConfig
from zeropp.capabilities.experts import RowsOfPairs, RowsOfTokens, combine, dispatch
from zeropp.optim import local_part
from zeropp.wire import Message


class MoE(FeedForward):
    """Experts, of which each token passes the K that the router chooses; perhaps a shared one.

    The result is Σ_k w_k expert_k(x), plus that of the shared MLP, which is multiplied by σ(g x) if
    it has a gate.
    """

    def __init__(self, config: ModelConfig, layer: int = 0, part: Part = WHOLE) -> None:
        super().__init__()
        self.config, self.layer, self.axis = config, layer, axis_of(part)
        self.router = Router(config)
        self.experts = Experts(config, part)
        self.losses = AuxiliaryLosses(config)
        whole = ("router", "shared_gate") + ("experts",) * (self.axis is None)
        self.grad_is_partial = whole if part.splits_rows else ()
        self.shared = self.shared_gate = None
        width = config.moe_shared_expert_intermediate_size
        if width is not None:
            self.shared = MLP(config, layer, part, width=width)
            if config.moe_shared_expert_gate:
                self.shared_gate = nn.Linear(config.hidden_size, 1, bias=False)

    @property
    def is_split(self) -> bool:
        """Whether tensor ranks split any of it: they only split the shared MLP."""
        return self.shared is not None

    @classmethod
    def flops(cls, config: ModelConfig) -> float:
        """Return the operations of the experts that a token passes, the router, the shared MLP."""
        router = 2 * config.hidden_size * config.num_experts
        shared = MLP.flops(config, config.moe_shared_expert_intermediate_size or 0)
        return router + expert_products(config) + shared

    @classmethod
    def messages(cls, forecast: Forecast, stage: Part) -> Iterator[Message]:
        """Yield the moves of tokens to experts and back."""
        axis = axis_of(stage)
        return iter(()) if axis is None else token_messages(forecast, stage, axis)

    @torch.compiler.disable  # how many rows an expert has is known only when it runs
    def forward(self, x: Tensor, sequences: Sequences = WHOLE_ROWS) -> Tensor:
        """Map x [B, S, H] to [B, S, H]."""
        tokens, record = x.flatten(0, 1), sequences.routing
        logits = self.router(tokens)  # [T, E]

        def assign() -> Assignment:
            return self._assign(logits, is_limited=sequences.cache is None)

        assignment = assign() if record is None else record.assignment(self.layer, assign)
        weights = self.router.weights(logits, assignment.experts)
        if record is not None:
            weights = self.losses.attach(weights, logits, record, self.layer, len(x))
        if self.axis is None or self.axis.across is None:
            rows = RowsOfPairs.apply(tokens, assignment.order, weights.shape[1])
            computed, num_rows = self._computed(rows, assignment.counts)
            by_token = RowsOfTokens.apply(computed, assignment.order, weights.numel())
            y = (by_token.unflatten(0, weights.shape) * weights[..., None]).sum(1)  # [T, H]
        else:
            copies = send_copies(tokens, weights, assignment, self.axis)
            computed, num_rows = self._computed(copies.rows(), copies.assignment.counts)
            y = return_sums(computed, copies)
        if record is not None:
            record.num_rows[self.layer] = num_rows
        y = y.to(x.dtype).view(x.shape)
        return y if self.shared is None else y + self._shared(x, sequences)

    def _computed(self, rows: Tensor, counts: Tensor) -> tuple[Tensor, int]:
        """Return what experts of this rank's node make of rows [M, H], by expert.

        The second value is how many rows this rank computed.
        """
        if self.axis is None or self.axis.group.size == 1:
            return self.experts(rows, counts), len(rows)
        group = self.axis.group
        sent = dispatch(rows, counts, group)
        return combine(self.experts(sent.rows, sent.counts), sent, group), len(sent.rows)

    def _shared(self, x: Tensor, sequences: Sequences) -> Tensor:
        """Return what the shared MLP adds, [B, S, H]."""
        y = self.shared(x, sequences)
        if self.shared_gate is None:
            return y
        return y * torch.sigmoid(F.linear(x, local_part(self.shared_gate.weight)))

    @torch.no_grad()
    def _assign(self, logits: Tensor, *, is_limited: bool) -> Assignment:
        """Choose the experts of all tokens, and drop what is beyond an expert's capacity."""
        experts = self.router.choose(logits)
        flat, num_experts = experts.flatten(), logits.shape[1]
        sorted_experts, order = flat.sort(stable=True)
        numbers = torch.arange(num_experts + 1, device=flat.device)
        bounds = torch.searchsorted(sorted_experts, numbers)
        factor = self.config.capacity_factor(training=self.training)
        if is_limited and factor is not None:
            capacity = math.ceil(len(flat) / num_experts * factor)
            capacity = max(capacity, self.config.moe_min_capacity)
            if self.config.moe_token_drop_policy == "probs":
                weights = self.router.weights(logits, experts).flatten()
                by_weight = weights.argsort(descending=True, stable=True)
                by_expert = by_weight[flat[by_weight].argsort(stable=True)]
            else:
                by_expert = order
            order = order[_kept(by_expert, bounds, capacity)[order]]
            return Assignment(
                experts=experts, order=order, counts=bounds.diff().clamp(max=capacity)
            )
        return Assignment(experts=experts, order=order, counts=bounds.diff())


def expert_products(config: ModelConfig) -> float:
    """Return the operations of the experts that a token passes, forward, without a shared one."""
    return MLP.flops(config, config.moe_router_topk * config.expert_ffn_size)


def _kept(by_expert: Tensor, bounds: Tensor, capacity: int) -> Tensor:
    """Return for each pair, bool [M], whether it is among the first `capacity` of its expert.

    by_expert: all pairs, expert after expert. bounds int64 [E + 1]: where those of each begin.
    """
    counts = bounds.diff()
    places = torch.arange(len(by_expert), device=by_expert.device)
    places -= bounds[:-1].repeat_interleave(counts)
    kept = torch.empty_like(by_expert, dtype=torch.bool)
    kept[by_expert] = places < capacity
    return kept


FEED_FORWARDS = {"moe_layers": MoE}
