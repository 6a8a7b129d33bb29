"""Losses that share tokens out equally to the experts, and one that keeps logits small.

With scores s of all experts in fp32, n_e the number of tokens that have expert e among their K best
scores, and T tokens (Fedus et al. 2021, section 2.2, for K experts, as in Megatron):

    load balancing   c E / (K T²) Σ_e n_e Σ_t s_te             1 if balanced, times c
    z                c mean_t logsumexp(logits_t)²             (Zoph et al. 2022, section 3.2)

n and T are those of a micro-batch (`aux_loss`), of each sample, whose losses are averaged
(`seq_aux_loss`), or of the global batch, n as the mean over the step's micro-batches so far
(`global_aux_loss`). Ranks that have parts of the tokens sum n, and each has a term of the loss.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor

from megatron_zpp.capabilities.experts.router import normalized, scores_of
from megatron_zpp.capabilities.experts.routing_record import RoutingRecord
from megatron_zpp.settings.config import ModelConfig

BALANCE, SEQUENCE_BALANCE, GLOBAL_BALANCE = "aux_loss", "seq_aux_loss", "global_aux_loss"
Z = "z_loss"


@dataclass(frozen=True)
class AuxiliaryLosses:
    """The losses of a model's layers with experts."""

    config: ModelConfig

    @cached_property
    def coefficients(self) -> dict[str, float]:
        """The coefficients of the losses that are computed, by kind."""
        z = self.config.moe_z_loss_coeff
        return self.config.auxiliary_losses | ({Z: z} if z else {})

    def attach(
        self, weights: Tensor, logits: Tensor, record: RoutingRecord, layer: int, num_samples: int
    ) -> Tensor:
        """Return `weights`, with the gradients of the losses of logits [B S, E] behind them.

        The losses are written to the record.
        """
        if not self.coefficients:
            return weights
        terms = self._terms(logits, record, layer, num_samples)
        for kind, term in terms.items():
            record.losses[kind, layer] = term.detach()
        total = sum(self.coefficients[kind] * term for kind, term in terms.items())
        return _WithLoss.apply(weights, total, record.scale)

    def _terms(
        self, logits: Tensor, record: RoutingRecord, layer: int, num_samples: int
    ) -> dict[str, Tensor]:
        """Return this rank's terms of the losses, 0-d."""
        num_parts, terms = record.samples.size, {}
        if self.config.auxiliary_losses:
            scores = self._scores(logits).unflatten(0, (num_samples, -1))  # [B, S, E]
            count = partial(self._counts, scores)
            by_sample = scores.sum(1)  # [B, E]
        length = logits.shape[0] // max(num_samples, 1)
        num_tokens = logits.shape[0] * num_parts
        for kind in self.config.auxiliary_losses:
            n = record.total(kind, layer, partial(_total, kind, layer, record, count))
            if kind == SEQUENCE_BALANCE:
                balance = self._balance(by_sample, n, length * num_parts)
                terms[kind] = balance / max(num_samples, 1)
                continue
            if kind == GLOBAL_BALANCE:
                num_tokens = logits.shape[0] * record.batch.size
            terms[kind] = self._balance(by_sample.sum(0), n, num_tokens)
        if Z in self.coefficients:
            squares = logits.float().logsumexp(dim=1).square()
            terms[Z] = squares.sum() / max(len(squares), 1) / num_parts
        return terms

    def _balance(self, scores: Tensor, counts: Tensor, num_tokens: int) -> Tensor:
        """Return E / (K T²) Σ scores · counts, 0-d, of sums over tokens [..., E]."""
        config = self.config
        factor = config.num_experts / (config.moe_router_topk * max(num_tokens, 1) ** 2)
        return (scores * counts).sum() * factor

    def _scores(self, logits: Tensor) -> Tensor:
        """Return scores fp32 [T, E] of all experts, whose sum is 1."""
        function = self.config.moe_router_score_function
        scores = scores_of(logits.float(), function)
        return scores if function == "softmax" else normalized(scores)

    @torch.no_grad()
    def _counts(self, scores: Tensor) -> Tensor:
        """Return how many tokens of each sample have each expert among their best, int64 [B, E]."""
        best = scores.topk(self.config.moe_router_topk, dim=2).indices.flatten(1)  # [B, S K]
        numbers = torch.arange(scores.shape[2], device=scores.device)
        return (best[..., None] == numbers).sum(1)


def _total(kind: str, layer: int, record: RoutingRecord, count: Callable[[], Tensor]) -> Tensor:
    """Return n of a loss over the ranks whose tokens it counts, fp32: [B, E] by sample, or [E]."""
    if kind == SEQUENCE_BALANCE:
        return record.samples.sum(count()).float()
    if kind == BALANCE:
        return record.samples.sum(count().sum(0)).float()
    return record.mean_so_far(kind, layer, record.batch.sum(count().sum(0)))


class _WithLoss(torch.autograd.Function):
    """The identity of x, whose backward gives a loss the gradient `scale`."""

    @staticmethod
    def forward(ctx, x: Tensor, loss: Tensor, scale: float | Tensor) -> Tensor:
        is_tensor = isinstance(scale, Tensor)
        ctx.loss_gradient = scale.to(loss.dtype) if is_tensor else loss.new_full((), scale)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        return gradient, ctx.loss_gradient, None
