"""The router: which experts compute a token, and with which weights.

It is made of pieces that the configuration puts together: a score function, before or after the
best are chosen; groups, of which some are chosen first; a bias that only the choice sees; a factor.
Softmax and sigmoid are computed in fp32 at least, and returned in the dtype of the logits.
Shapes: T tokens, H hidden, E experts, K experts of a token, G groups.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_zpp.settings.config import ModelConfig
from zeropp.optim import local_part

DTYPES = {"fp32": torch.float32, "fp64": torch.float64}
TINY = 1e-20  # added to sums of scores before a division, as DeepSeek-V3 and Megatron do


class Router(nn.Module):
    """A linear layer whose logits choose the experts of each token.

    The bias of DeepSeek-V3 (2024, section 2.1.2), `expert_bias`, takes part in the choice alone. It
    stays in fp32 whatever the dtype of the model, as its steps are too small for 16 bit. `bias` is
    that of the linear layer.
    """

    expert_bias: Tensor | None

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size))
        self.bias = nn.Parameter(torch.empty(config.num_experts)) if config.has_mlp_bias else None
        expert_bias = None
        if config.moe_router_enable_expert_bias:
            expert_bias = torch.empty(config.num_experts, dtype=torch.float32)
        self.register_buffer("expert_bias", expert_bias)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens [T, H] to logits [T, E]."""
        config, weight, bias = self.config, local_part(self.weight), local_part(self.bias)
        if self.training and config.moe_input_jitter_eps:
            noise = torch.empty_like(tokens).uniform_(-1, 1) * config.moe_input_jitter_eps
            tokens = tokens * (1 + noise)
        if config.moe_router_dtype is not None:
            dtype = DTYPES[config.moe_router_dtype]
            tokens, weight = tokens.to(dtype), weight.to(dtype)
            bias = bias if bias is None else bias.to(dtype)
        logits = F.linear(tokens, weight, bias)
        if self.training and config.moe_router_force_load_balancing:
            # The gradient is that of the logits, so that a step costs what it always does.
            logits = logits + (torch.rand_like(logits) - logits).detach()
        return logits

    @torch.no_grad()
    def choose(self, logits: Tensor) -> Tensor:
        """Return the experts int64 [T, K] of each token."""
        config, ranked = self.config, logits
        if not chooses_by_logits(config):
            ranked = scores_of(logits, config.moe_router_score_function)
        if self.expert_bias is not None:
            ranked = ranked + self.expert_bias.to(ranked.device)
        if config.moe_router_num_groups is not None:
            ranked = in_best_groups(
                ranked,
                config.moe_router_num_groups,
                config.moe_router_group_topk,
                config.group_best,
            )
        return ranked.topk(config.moe_router_topk, dim=1).indices

    def weights(self, logits: Tensor, experts: Tensor) -> Tensor:
        """Return the weights [T, K] of the chosen experts int64 [T, K]."""
        config, function = self.config, self.config.moe_router_score_function
        if chooses_by_logits(config):
            weights = scores_of(logits.gather(1, experts), "softmax")
        else:
            weights = scores_of(logits, function).gather(1, experts)
            if function != "softmax" and config.moe_router_topk > 1:
                weights = normalized(weights)
        factor = config.moe_router_topk_scaling_factor
        return weights if factor is None else weights * factor

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Router":
        """Move or cast the module; the bias is moved only."""
        result = super()._apply(_keeping_fp32(fn, self.expert_bias), recurse)
        return result


def chooses_by_logits(config: ModelConfig) -> bool:
    """Whether the softmax is taken over the chosen experts alone."""
    return config.moe_router_score_function == "softmax" and not config.moe_router_pre_softmax


def scores_of(logits: Tensor, function: str) -> Tensor:
    """Return the scores of logits [T, E], of their shape and dtype."""
    values = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return SCORES[function](values).to(logits.dtype)


def normalized(scores: Tensor) -> Tensor:
    """Return scores [T, ...] divided by their sum in the last dim."""
    return scores / (scores.sum(-1, keepdim=True) + TINY)


def in_best_groups(scores: Tensor, num_groups: int, chosen: int, best: int) -> Tensor:
    """Return scores [T, E], -inf outside of the `chosen` best of G groups.

    A group is ranked by the sum of its `best` best scores (DeepSeek-V2 2024, section 2.2.2, where
    that is 1; DeepSeek-V3, where it is K / `chosen`).
    """
    groups = scores.unflatten(1, (num_groups, -1))  # [T, G, E/G]
    ranks = groups.topk(best, dim=2).values.sum(2)
    others = torch.ones_like(ranks, dtype=torch.bool)
    others.scatter_(1, ranks.topk(chosen, dim=1).indices, False)
    return groups.masked_fill(others[..., None], -torch.inf).flatten(1)


def _sqrt_softplus(logits: Tensor) -> Tensor:
    return F.softplus(logits).sqrt()


SCORES = {
    "softmax": partial(torch.softmax, dim=-1),
    "sigmoid": torch.sigmoid,
    "sqrtsoftplus": _sqrt_softplus,
}


def _keeping_fp32(fn: Callable[[Tensor], Tensor], bias: Tensor | None) -> Callable:
    """Return `fn`, which of `bias` changes the device only."""

    def apply(tensor: Tensor) -> Tensor:
        result = fn(tensor)
        if tensor is bias and result.dtype != tensor.dtype:
            return tensor.to(result.device)
        return result

    return apply
