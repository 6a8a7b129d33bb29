"""Small models with experts, random configurations of their routers, and the formula per token."""

import random
from dataclasses import replace

import torch
from torch import Tensor

from megatron_zpp.model.attention.sequences import Sequences
from megatron_zpp.model.mlp import activate
from megatron_zpp.model.moe.layer import MoE
from megatron_zpp.model.routing_record import RoutingRecord
from megatron_zpp.settings.config import ModelConfig
from tests.megatron_zpp.model.small import LLAMA, build

EXPERTS = replace(
    LLAMA,
    num_experts=8,
    moe_ffn_hidden_size=24,
    init_method_std=0.3,
    hidden_dropout=0.0,
    attention_dropout=0.0,
)


def random_config(seed: int) -> ModelConfig:
    """Return a configuration drawn from those that are allowed."""
    draw = random.Random(seed)
    function = draw.choice(("softmax", "sigmoid", "sqrtsoftplus"))
    experts, groups = draw.choice(((4, None), (6, None), (8, 4), (8, 2), (12, 3)))
    chosen = None if groups is None else draw.randint(1, groups)
    most = experts if groups is None else experts // groups * chosen
    topk = draw.randint(1, most)
    best = None
    if groups is not None:
        best = draw.randint(1, experts // groups)
    shared = draw.choice((None, 16))
    return replace(
        EXPERTS,
        num_layers=1,
        num_experts=experts,
        moe_ffn_hidden_size=draw.choice((None, 24, 10)),
        moe_router_topk=topk,
        moe_router_score_function=function,
        moe_router_pre_softmax=topk == 1 or draw.random() < 0.5,
        moe_router_num_groups=groups,
        moe_router_group_topk=chosen,
        moe_router_group_best=best,
        moe_router_enable_expert_bias=function != "softmax" and draw.random() < 0.5,
        moe_router_topk_scaling_factor=draw.choice((None, 2.5)),
        moe_router_dtype=draw.choice((None, "fp32", "fp64")),
        moe_shared_expert_intermediate_size=shared,
        moe_shared_expert_gate=shared is not None and draw.random() < 0.5,
        swiglu=draw.random() < 0.7,
    )


def layer_of(config: ModelConfig, seed: int = 1) -> MoE:
    """Return the layer of a model's first block, its bias drawn if it has one."""
    layer = build(config, seed).blocks[0].mlp
    if layer.router.expert_bias is not None:
        layer.router.expert_bias.normal_(0, 0.3, generator=torch.Generator().manual_seed(seed))
    return layer


def inputs(seed: int = 3, rows: int = 2, length: int = 6, hidden: int = 32) -> Tensor:
    return torch.randn(rows, length, hidden, generator=torch.Generator().manual_seed(seed))


def recorded(**facts: object) -> Sequences:
    """Sequences of a pass that is recorded."""
    return Sequences(routing=RoutingRecord(**facts))


def by_token(layer: MoE, x: Tensor) -> Tensor:
    """Return what the layer computes of x [B, S, H] by its formula, one token after another."""
    outputs = [_token(layer, token) for token in x.flatten(0, 1)]
    return torch.stack(outputs).view(x.shape)


def _token(layer: MoE, x: Tensor) -> Tensor:
    config, router = layer.config, layer.router
    logits = router.weight @ x
    function = config.moe_router_score_function
    scores = {
        "softmax": lambda: logits.exp() / logits.exp().sum(),
        "sigmoid": lambda: 1 / (1 + (-logits).exp()),
        "sqrtsoftplus": lambda: (1 + logits.exp()).log().sqrt(),
    }[function]()
    ranked = logits if function == "softmax" and not config.moe_router_pre_softmax else scores
    if router.expert_bias is not None:
        ranked = ranked + router.expert_bias
    chosen = _chosen(ranked.tolist(), config)
    weights = scores[chosen]
    if function != "softmax" and config.moe_router_topk > 1:
        weights = weights / weights.sum()
    if function == "softmax" and not config.moe_router_pre_softmax:
        weights = logits[chosen].exp() / logits[chosen].exp().sum()
    weights = weights * (config.moe_router_topk_scaling_factor or 1)
    y = sum(
        weight * _mlp(x, *expert_matrices(layer, number), config)
        for number, weight in zip(chosen, weights, strict=True)
    )
    if layer.shared is not None:
        shared = layer.shared
        gate = None if shared.gate is None else shared.gate.weight
        add = _mlp(x, gate, shared.input.weight, shared.output.weight, config)
        if layer.shared_gate is not None:
            add = add * torch.sigmoid(layer.shared_gate.weight @ x)
        y = y + add
    return y


def _chosen(ranked: list[float], config: ModelConfig) -> list[int]:
    allowed = list(range(len(ranked)))
    if config.moe_router_num_groups is not None:
        size = len(ranked) // config.moe_router_num_groups
        groups = [allowed[first : first + size] for first in allowed[::size]]

        def rank(group: list[int]) -> float:
            return sum(sorted((ranked[each] for each in group), reverse=True)[: config.group_best])

        groups = sorted(groups, key=rank, reverse=True)[: config.moe_router_group_topk]
        allowed = [each for group in groups for each in group]
    return sorted(allowed, key=lambda each: -ranked[each])[: config.moe_router_topk]


def expert_matrices(layer: MoE, number: int) -> tuple[Tensor | None, Tensor, Tensor]:
    """Return gate, input and output [out, in] of an expert."""
    experts, num = layer.experts, layer.config.num_experts
    gate = None if experts.gate is None else experts.gate.weight.chunk(num)[number]
    return gate, experts.input.weight.chunk(num)[number], experts.output.weight.chunk(num)[number]


def _mlp(x: Tensor, gate: Tensor | None, up: Tensor, down: Tensor, config: ModelConfig) -> Tensor:
    if gate is None:
        return down @ activate(up @ x, config)
    return down @ (activate(gate @ x, config) * (up @ x))
