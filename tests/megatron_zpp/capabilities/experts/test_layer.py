"""The layer of experts against its formula, and what must hold whatever the weights are."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megatron_zpp.capabilities.experts.layer import MoE
from megatron_zpp.model.attention.sequences import Sequences
from megatron_zpp.model.flops import flops_per_token
from megatron_zpp.settings.config import RecomputeConfig
from tests.megatron_zpp.capabilities.experts.small_experts import (
    EXPERTS,
    by_token,
    inputs,
    layer_of,
    random_config,
    recorded,
)
from tests.megatron_zpp.model.small import build


@pytest.mark.parametrize("seed", range(24))
def test_a_random_router_computes_the_formula(seed: int) -> None:
    """Values of about 1 are sums of 32 products in fp32: 32 · 2^-24 = 2e-6, some times over."""
    layer = layer_of(random_config(seed), seed)
    x, weight = inputs(seed).requires_grad_(), inputs(seed + 100)
    found, expected = layer(x, recorded()), by_token(layer, x)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-5)
    leaves = [x, *layer.parameters()]
    both = (gradients(y, weight, leaves) for y in (found, expected))
    for own, naive in zip(*both, strict=True):
        torch.testing.assert_close(own, naive, rtol=1e-4, atol=1e-4)


def gradients(y: Tensor, weight: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    found = torch.autograd.grad((y * weight).sum(), leaves, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for x, g in zip(leaves, found, strict=True)]


def test_all_tokens_may_go_to_the_same_experts() -> None:
    config = replace(EXPERTS, moe_router_score_function="sigmoid",
                     moe_router_enable_expert_bias=True)  # fmt: skip
    layer, x, sequences = layer_of(config), inputs(), recorded()
    layer.router.expert_bias.copy_(torch.tensor([0.0, 9, 0, 0, 9, 0, 0, 0]))
    layer(x, sequences).sum().backward()
    assert sequences.routing.assignments[0].counts.tolist() == [0, 12, 0, 0, 12, 0, 0, 0]
    used = layer.experts.output.weight.grad.unflatten(0, (8, -1)).abs().sum((1, 2)) > 0
    assert used.nonzero().flatten().tolist() == [1, 4]


def test_no_tokens_give_gradients_of_zeros() -> None:
    """A rank without tokens must take part in the backward pass as others do."""
    config = replace(EXPERTS, moe_aux_loss_coeff=(0.1,), moe_z_loss_coeff=0.1)
    layer = layer_of(config)
    x = inputs(length=0).requires_grad_()
    y = layer(x, recorded())
    y.sum().backward()
    assert y.shape == x.shape == x.grad.shape
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None and not parameter.grad.any(), name


@pytest.mark.parametrize("policy", ["probs", "position"])
def test_full_experts_drop_tokens(policy: str) -> None:
    """Of 24 pairs, 8 experts take ceil(24 / 8 · 0.5) = 2 each."""
    config = replace(EXPERTS, moe_expert_capacity_factor=0.5, moe_token_drop_policy=policy)
    layer, x, sequences = layer_of(config), inputs(), recorded()
    y = layer(x, sequences)
    assignment = sequences.routing.assignments[0]
    experts, whole = assignment.experts.flatten(), layer_of(EXPERTS)
    logits = layer.router(x.flatten(0, 1))
    weights = layer.router.weights(logits, assignment.experts).flatten()
    kept: list[int] = []
    for number in range(8):
        pairs = [pair for pair in range(24) if experts[pair] == number]
        if policy == "probs":
            pairs.sort(key=lambda pair: -weights[pair].item())
        assert assignment.counts[number] == min(len(pairs), 2)
        kept += sorted(pairs[:2])
    assert assignment.order.tolist() == kept and 0 < len(kept) < 24
    mask = torch.zeros(24).scatter(0, assignment.order, 1.0).view(12, 2, 1)
    each = whole.experts(
        x.flatten(0, 1).repeat_interleave(2, 0)[experts.argsort(stable=True)],
        torch.bincount(experts, minlength=8),
    )[experts.argsort(stable=True).argsort(stable=True)].view(12, 2, -1)
    expected = (each * mask * weights.view(12, 2, 1)).sum(1)
    torch.testing.assert_close(y.flatten(0, 1), expected, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_where_tokens_are_dropped() -> None:
    """Evaluation has a factor of its own, generation drops nothing, and few tokens are kept."""
    config = replace(EXPERTS, moe_expert_capacity_factor=0.5, moe_eval_capacity_factor=8.0)
    layer, whole, x = layer_of(config), layer_of(EXPERTS), inputs()
    assert not torch.equal(layer.train()(x), whole(x))
    assert torch.equal(layer.eval()(x), whole(x))
    assert torch.equal(layer.train()(x, Sequences(cache=object())), whole(x))
    least = layer_of(replace(config, moe_min_capacity=24)).train()
    assert torch.equal(least(x), whole(x))
    unlimited = layer_of(replace(config, disable_moe_token_dropping=True)).train()
    assert torch.equal(unlimited(x), whole(x))


@torch.no_grad()
def test_noise_and_random_experts_are_of_training_alone() -> None:
    for change in ({"moe_input_jitter_eps": 0.5}, {"moe_router_force_load_balancing": True}):
        layer, whole, x = layer_of(replace(EXPERTS, **change)), layer_of(EXPERTS), inputs()
        assert not torch.equal(layer.train()(x), whole(x))
        assert torch.equal(layer.eval()(x), whole(x))


@torch.no_grad()
def test_jitter_moves_the_router_alone() -> None:
    """Logits change by at most the given share of what enters, and tokens do not change."""
    router = layer_of(replace(EXPERTS, moe_input_jitter_eps=0.1)).router.train()
    tokens = inputs().flatten(0, 1)
    most = 0.1 * tokens.abs() @ router.weight.abs().t()
    change = (router(tokens) - router.eval()(tokens)).abs()
    assert (change <= most * 1.001).all() and change.max() > 0


def test_the_bias_stays_in_fp32_and_the_router_may() -> None:
    config = replace(EXPERTS, moe_router_score_function="sigmoid", moe_router_dtype="fp32",
                     moe_router_enable_expert_bias=True)  # fmt: skip
    layer = layer_of(config)
    bias = layer.router.expert_bias.clone()
    layer = layer.bfloat16()
    assert layer.router.expert_bias.dtype == torch.float32 and layer.router.weight.grad is None
    assert torch.equal(layer.router.expert_bias, bias)
    assert "router.expert_bias" in layer.state_dict()
    x = inputs().bfloat16()
    assert layer.router(x.flatten(0, 1)).dtype == torch.float32
    assert layer(x).dtype == torch.bfloat16
    assert layer.to("meta").router.expert_bias.is_meta


def test_layers_with_experts_and_first_values() -> None:
    """The last matrices of a branch are drawn with a smaller deviation, experts as others."""
    config = replace(EXPERTS, num_layers=4, moe_layer_freq="2", init_method_std=0.5,
                     moe_shared_expert_intermediate_size=64)  # fmt: skip
    model = build(config)
    assert [isinstance(block.mlp, MoE) for block in model.blocks] == [True, False, True, False]
    layer = model.blocks[0].mlp
    for weight, std in (
        (layer.experts.input.weight, 0.5), (layer.experts.output.weight, 0.5 / 8**0.5),
        (layer.shared.output.weight, 0.5 / 8**0.5),
    ):  # fmt: skip
        assert weight.std().item() == pytest.approx(std, rel=0.1)
    assert not build(replace(config, moe_router_score_function="sigmoid",
                             moe_router_enable_expert_bias=True)
                     ).blocks[0].mlp.router.expert_bias.any()  # fmt: skip


def test_operations_of_a_token() -> None:
    """Three matrices of K experts and of the shared MLP, and the router; forward 2, backward 4."""
    config = replace(EXPERTS, num_layers=2, moe_layer_freq="[0,1]", moe_router_topk=3,
                     moe_shared_expert_intermediate_size=16)  # fmt: skip
    dense = replace(config, num_experts=None)
    found = [flops_per_token(each, RecomputeConfig(), 50) for each in (config, dense)]
    expected = 6 * 32 * (3 * 3 * 24 + 3 * 16 + 8 - 3 * dense.ffn_size)
    assert found[0] - found[1] == pytest.approx(expected)
