"""Small models with experts, random configurations of their routers, and the formula per token."""

import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from megatron_zpp.capabilities.experts.layer import MoE
from megatron_zpp.capabilities.experts.routing_record import RoutingRecord
from megatron_zpp.model.attention.sequences import Sequences
from megatron_zpp.model.mlp import activate
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
    config = replace(
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
    return replace(config, **_activation(draw, config.swiglu))


def _activation(draw: random.Random, is_gated: bool) -> dict[str, object]:
    """Return whether there are biases, and how a gate is applied."""
    fields: dict[str, object] = {"add_mlp_bias": draw.random() < 0.5}
    if not is_gated:
        return fields
    is_quick = draw.random() < 0.5
    limit, offset = draw.choice((None, 0.5, 2.0)), draw.choice((0.0, 1.0))
    how = {"activation_func_clamp_value": limit, "glu_linear_offset": offset}
    return fields | how | {"swiglu": not is_quick, "quick_geglu": is_quick}


def layer_of(config: ModelConfig, seed: int = 1) -> MoE:
    """Return the layer of a model's first block, its biases drawn if it has some."""
    layer, generator = build(config, seed).blocks[0].mlp, torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in layer.parameters():
            if parameter.ndim == 1:
                parameter.normal_(0, 0.3, generator=generator)
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
    logits = _linear(router, x)
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
        weight * _mlp(x, expert_of(layer, number), config)
        for number, weight in zip(chosen, weights, strict=True)
    )
    if layer.shared is not None:
        shared = layer.shared
        add = _mlp(x, shared, config)
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


def expert_of(layer: MoE, number: int) -> SimpleNamespace:
    """Return gate, input and output of an expert, each with its weight [out, in] and its bias."""
    parts = {}
    for name in ("gate", "input", "output"):
        whole = getattr(layer.experts, name)
        parts[name] = (
            None
            if whole is None
            else SimpleNamespace(
                weight=_part(whole.weight, number, layer), bias=_part(whole.bias, number, layer)
            )
        )
    return SimpleNamespace(**parts)


def _part(whole: Tensor | None, number: int, layer: MoE) -> Tensor | None:
    return None if whole is None else whole.chunk(layer.config.num_experts)[number]


def _linear(layer: Any, x: Tensor) -> Tensor:
    y = layer.weight @ x
    return y if layer.bias is None else y + layer.bias


def _mlp(x: Tensor, mlp: Any, config: ModelConfig) -> Tensor:
    up = _linear(mlp.input, x)
    if mlp.gate is None:
        return _linear(mlp.output, activate(up, config))
    gate, limit = _linear(mlp.gate, x), config.activation_func_clamp_value
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    sharpness = 1.702 if config.quick_geglu else 1
    activated = gate / (1 + (-sharpness * gate).exp())
    return _linear(mlp.output, activated * (up + config.glu_linear_offset))
