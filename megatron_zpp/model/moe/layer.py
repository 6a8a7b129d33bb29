"""The layer of experts that takes the place of a block's MLP (Shazeer et al. 2017).

x has a rank's rows where rows are split. Shapes: B batch, S sequence, H hidden, T = B S tokens,
E experts, K experts of a token, M pairs of a token and an expert.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_zpp.model.attention.sequences import WHOLE_ROWS, Sequences
from megatron_zpp.model.mlp import MLP
from megatron_zpp.model.moe.auxiliary_losses import AuxiliaryLosses
from megatron_zpp.model.moe.experts import Experts
from megatron_zpp.model.moe.router import Router
from megatron_zpp.model.part import WHOLE, Part
from megatron_zpp.model.routing_record import Assignment
from megatron_zpp.settings.config import ModelConfig
from zeropp.optim.step_or_skip import local_part


class MoE(nn.Module):
    """Experts, of which each token passes the K that the router chooses; perhaps a shared one.

    The result is Σ_k w_k expert_k(x), plus that of the shared MLP, which is multiplied by σ(g x) if
    it has a gate.
    """

    def __init__(self, config: ModelConfig, layer: int = 0, part: Part = WHOLE) -> None:
        super().__init__()
        self.config, self.layer, self.axis = config, layer, part.experts
        self.router = Router(config)
        self.experts = Experts(config, part)
        self.losses = AuxiliaryLosses(config)
        self.shared = self.shared_gate = None
        width = config.moe_shared_expert_intermediate_size
        if width is not None:
            self.shared = MLP(config, layer, part, width=width, name="mlp.shared")
            if config.moe_shared_expert_gate:
                self.shared_gate = nn.Linear(config.hidden_size, 1, bias=False)

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
        rows = _RowsOfExperts.apply(tokens, assignment.order, self.config.moe_router_topk)
        if self.axis is None:
            num_rows, computed = len(rows), self.experts(rows, assignment.counts)
        else:
            sent = self.axis.dispatch(rows, assignment.counts)
            num_rows = len(sent.rows)
            computed = self.axis.combine(self.experts(sent.rows, sent.counts), sent)
        if record is not None:
            record.num_rows[self.layer] = num_rows
        by_token = _RowsOfTokens.apply(computed, assignment.order, weights.numel())
        y = (by_token.unflatten(0, weights.shape) * weights[..., None]).sum(1)  # [T, H]
        y = y.to(x.dtype).view(x.shape)
        return y if self.shared is None else y + self._shared(x, sequences)

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


class _RowsOfExperts(torch.autograd.Function):
    """Rows [M, H] of tokens [T, H] in the order of pairs; gradients of a token are summed over K.

    The sums are in the order of a token's experts, and so the same in each run.
    """

    @staticmethod
    def forward(ctx, tokens: Tensor, order: Tensor, num_experts: int) -> Tensor:
        ctx.save_for_backward(order)
        ctx.num_experts, ctx.num_tokens = num_experts, len(tokens)
        return tokens[order // num_experts]

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None, None]:
        (order,) = ctx.saved_tensors
        by_pair = _at_places(gradient, order, ctx.num_tokens * ctx.num_experts)
        by_token = by_pair.unflatten(0, (ctx.num_tokens, ctx.num_experts))
        return by_token.sum(1), None, None


class _RowsOfTokens(torch.autograd.Function):
    """Rows [T K, H] by token of rows [M, H] in the order of pairs; zeros for dropped pairs."""

    @staticmethod
    def forward(ctx, rows: Tensor, order: Tensor, num_pairs: int) -> Tensor:
        ctx.save_for_backward(order)
        return _at_places(rows, order, num_pairs)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None, None]:
        (order,) = ctx.saved_tensors
        return gradient[order], None, None


def _at_places(rows: Tensor, places: Tensor, num: int) -> Tensor:
    """Return `num` rows, of which those at `places` [M] are `rows` [M, H], and the others zeros."""
    is_full = len(places) == num
    whole = (torch.empty if is_full else torch.zeros)(
        (num, rows.shape[1]), dtype=rows.dtype, device=rows.device
    )
    whole[places] = rows
    return whole
