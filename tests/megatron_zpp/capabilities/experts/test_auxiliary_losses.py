"""The losses of experts against their formulas, written out token by token."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megatron_zpp.capabilities.experts.auxiliary_losses import AuxiliaryLosses
from megatron_zpp.capabilities.experts.router import Router
from megatron_zpp.capabilities.experts.routing_record import routing_records
from megatron_zpp.model.gpt import GPT
from megatron_zpp.model.part import Execution
from megatron_zpp.settings.config import ModelConfig, RecomputeConfig
from tests.megatron_zpp.capabilities.experts.small_experts import (
    EXPERTS,
    inputs,
    layer_of,
    recorded,
)
from tests.megatron_zpp.model.small import build, rows

ALL = replace(
    EXPERTS,
    moe_router_load_balancing_type=("aux_loss", "seq_aux_loss", "global_aux_loss"),
    moe_aux_loss_coeff=(0.1, 0.2, 0.3),
    moe_z_loss_coeff=0.4,
)
SIGMOID = replace(ALL, moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True)
B, S, E, K = 2, 6, 8, 2


def scores_and_counts(logits: Tensor, config: ModelConfig) -> tuple[Tensor, Tensor]:
    """Return scores [B, S, E], and which experts are the best of a token, without any bias."""
    if config.moe_router_score_function == "softmax":
        scores = logits.softmax(-1)
    else:
        scores = logits.sigmoid() / logits.sigmoid().sum(-1, keepdim=True)
    order = scores.argsort(dim=-1, descending=True)
    return scores, torch.zeros_like(scores).scatter(-1, order[..., :K], 1.0)


def balance(scores: Tensor, is_best: Tensor) -> Tensor:
    """Return the loss of tokens [T, E]: E / (K T²) Σ_e n_e Σ_t s_te."""
    total = sum(is_best[:, e].sum() * scores[:, e].sum() for e in range(E))
    return total * E / (K * len(scores) ** 2)


@pytest.mark.parametrize("config", [ALL, SIGMOID])
def test_losses_and_their_gradients(config: ModelConfig) -> None:
    """A scale multiplies the gradients only; the global loss has the mean of the counts so far."""
    step, losses = routing_records(2, scale=3.0), AuxiliaryLosses(config)
    counts_before = 0
    for number, record in enumerate(step):
        generator = torch.Generator().manual_seed(number)
        logits = torch.randn(B * S, E, generator=generator).requires_grad_()
        weights = torch.ones(B * S, K, requires_grad=True)
        attached = losses.attach(weights, logits, record, 5, B)
        assert torch.equal(attached, weights)
        attached.sum().backward()
        assert torch.equal(weights.grad, torch.ones(B * S, K))

        again = logits.detach().requires_grad_()
        scores, is_best = scores_and_counts(again.view(B, S, E), config)
        counts = is_best.sum((0, 1))
        counts_before = counts_before + counts
        mean = counts_before / (number + 1)
        expected = {
            "aux_loss": balance(scores.flatten(0, 1), is_best.flatten(0, 1)),
            "seq_aux_loss": sum(map(balance, scores, is_best)) / B,
            "global_aux_loss": (scores.sum((0, 1)) * mean).sum() * E / (K * (B * S) ** 2),
            "z_loss": (again.exp().sum(1).log() ** 2).mean(),
        }
        for kind, value in expected.items():
            assert record.losses[kind, 5].item() == pytest.approx(value.item(), rel=1e-5), kind
        coefficients = (0.1, 0.2, 0.3, 0.4)
        total = sum(c * loss for c, loss in zip(coefficients, expected.values(), strict=True))
        torch.testing.assert_close(logits.grad, 3 * torch.autograd.grad(total, again)[0])


def test_without_a_record_there_are_no_losses() -> None:
    """As in evaluation; the gradients are those of a model whose coefficients are 0."""
    x = inputs()
    found = []
    for config, sequences in ((ALL, ()), (EXPERTS, ()), (ALL, (recorded(),))):
        layer = layer_of(config)
        layer(x, *sequences).sum().backward()
        found.append(layer.router.weight.grad)
    assert torch.equal(found[0], found[1]) and not torch.allclose(found[0], found[2])


@pytest.mark.parametrize("granularity", ["full", "selective"])
def test_a_recomputation_decides_nothing(granularity: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts are chosen once for each layer and micro-batch; gradients are equal to the bit."""

    tokens, found = rows(), []
    calls = []
    choose = Router.choose

    def counted(router: Router, logits: Tensor) -> Tensor:
        calls.append(router)
        return choose(router, logits)

    monkeypatch.setattr(Router, "choose", counted)
    for recompute in (None, granularity):
        execution = Execution(RecomputeConfig(recompute_granularity=recompute))
        model = build(replace(ALL, moe_input_jitter_eps=0.1), execution=execution)
        found.append((gradients_of(model, tokens), len(calls)))
    (plain, first), (again, both) = found
    assert first == 6 and both == 12  # three layers, two micro-batches
    assert plain.keys() == again.keys()
    for name, gradient in plain.items():
        assert torch.equal(gradient, again[name]), name


def gradients_of(model: GPT, tokens: Tensor) -> dict[str, Tensor]:
    torch.manual_seed(1)
    for record in routing_records(2):
        model(tokens[:, :-1], tokens[:, 1:], routing=record).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}
