"""Experts on ranks of several nodes compute what they do on one rank, and copies are counted.

Four ranks form nodes of two or of one. Each has tokens of its own, and a part of the experts.
"""

import os
from collections import Counter
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_zpp.capabilities.experts.axis import NAME, ExpertAxis
from megatron_zpp.capabilities.experts.layer import MoE
from megatron_zpp.capabilities.experts.messages import copies_across_nodes
from megatron_zpp.capabilities.experts.relay import COUNT_BYTES, copy_bytes
from megatron_zpp.model.part import Part
from megatron_zpp.settings.config import ModelConfig
from tests.megatron_zpp.capabilities.experts.small_experts import (
    EXPERTS,
    inputs,
    layer_of,
    random_config,
    recorded,
)
from tests.ranks import ranks
from zeropp.ranks.groups import shared_group
from zeropp.wire.rank_group import AXES, Nodes, RankGroup
from zeropp.wire.traffic import Traffic

SIZE = 4
DRAWS = int(os.environ.get("RANDOM_RELAYS", "6"))  # for each size of the nodes
MATRICES = ("gate", "input", "output")


def axis_of(rank: int, per_node: int, bits: int = 16) -> ExpertAxis:
    """The ranks that split the experts: all, as nodes of `per_node`."""
    nodes, ledger = Nodes(num_ranks=SIZE, ranks_per_node=per_node), Traffic(AXES)

    def peers(members: range) -> RankGroup:
        group = shared_group("expert", members, range(SIZE))
        return RankGroup(
            members=tuple(members), position=rank, nodes=nodes, purpose="expert", ledger=ledger,
            group=group,
        )  # fmt: skip

    first = rank // per_node * per_node
    across = peers(range(rank - first, SIZE, per_node)) if per_node < SIZE else None
    own = peers(range(first, first + per_node))
    return ExpertAxis(group=own, across=across, bits=bits)


def split_layer(whole: MoE, axis: ExpertAxis) -> MoE:
    """A layer with the part of another one's experts that this rank has."""
    layer = MoE(whole.config, 0, Part(axes={NAME: axis}))
    for name, weight in whole.state_dict().items():
        is_expert = name.startswith("experts.")
        layer.state_dict()[name].copy_(weight.chunk(SIZE)[dist.get_rank()] if is_expert else weight)
    return layer


def random_case(seed: int) -> tuple[ModelConfig, list[int]]:
    """A configuration whose experts 4 ranks split, and how many tokens each rank has."""
    generator = torch.Generator().manual_seed(seed)

    def draw(most: int) -> int:
        return int(torch.randint(0, most + 1, (), generator=generator))

    config = random_config(seed)
    config = replace(config, num_experts=config.num_experts // SIZE * SIZE)
    if config.moe_router_topk > config.num_experts:
        config = replace(config, moe_router_topk=2)
    if draw(2) == 0:
        config = replace(config, moe_expert_capacity_factor=0.5 + draw(1))
        config = replace(config, moe_token_drop_policy=("probs", "position")[draw(1)])
    lengths = [(0, 1, 3, 8)[draw(3)] for _ in range(SIZE)]
    return config, lengths if draw(3) else [0, 0, 5, 0]


def gradients(layer: MoE, pairs: list[tuple[Tensor, Tensor]]) -> tuple[list[Tensor], list[Tensor]]:
    """What a layer makes of each x, and the gradients of all parameters, for those of results."""
    layer.zero_grad(set_to_none=True)
    results = [layer(x, recorded()) for x, _ in pairs]
    sum((y * gradient).sum() for y, (_, gradient) in zip(results, pairs, strict=True)).backward()
    return results, [parameter.grad for parameter in layer.parameters()]


@pytest.mark.parametrize("per_node", [2, 1])
@ranks(SIZE)
def test_the_numbers_are_those_of_one_rank(per_node: int) -> None:
    """Values of about 1 are sums of 32 products in fp32, as in test_layer.py."""
    rank = dist.get_rank()
    close = partial(torch.testing.assert_close, rtol=1e-4, atol=1e-4)
    for seed in range(DRAWS):
        config, lengths = random_case(seed)
        whole, axis = layer_of(config, seed).train(), axis_of(rank, per_node)
        layer = split_layer(whole, axis).train()
        if config.moe_router_enable_expert_bias and seed % 2:  # all tokens to the same experts
            for each in (whole, layer):
                each.router.expert_bias[-config.moe_router_topk :] += 100
        pairs = [
            (inputs(seed + each, 1, n).requires_grad_(), inputs(seed + each + 50, 1, n))
            for each, n in enumerate(lengths)
        ]
        expected, all_gradients = gradients(whole, pairs)
        x, weight = pairs[rank]
        expected_x, x.grad = x.grad, None
        (found,), own_gradients = gradients(layer, [(x, weight)])
        message = f"seed {seed}: {config}, {lengths}"
        close(found, expected[rank], msg=lambda text, m=message: f"{m}\n{text}")
        close(x.grad, expected_x, msg=lambda text, m=message: f"{m}\n{text}")
        for (name, _), own, other in zip(
            whole.named_parameters(), own_gradients, all_gradients, strict=True
        ):
            if name.startswith("experts."):
                other = other.chunk(SIZE)[rank]
            else:
                dist.all_reduce(own)
            close(own, other, msg=lambda text, m=message, n=name: f"{n}, {m}\n{text}")


@pytest.mark.parametrize("bits", [16, 8])
@ranks(SIZE)
def test_a_token_crosses_once_to_each_node_that_has_experts_of_it(bits: int) -> None:
    """The ledger is the sum of what was sent, and of ids and weights; two runs give one result."""
    rank, config = dist.get_rank(), replace(EXPERTS, moe_router_topk=3, moe_ffn_hidden_size=8)
    whole, results = layer_of(config).bfloat16(), []
    needed = [Counter(), Counter()]  # copies from each rank to another node, pairs of each rank
    for sender in range(SIZE):
        x = inputs(sender, 1, 5 + sender).bfloat16().flatten(0, 1)
        for chosen in whole.router.choose(whole.router(x)).tolist():
            there = {expert // 4 for expert in chosen}
            needed[0][sender] += 1 - sender // 2 in there
            for expert in chosen:
                relay = expert // 4 * 2 + sender % 2
                needed[1][relay, expert // 2] += 1
    for _ in range(2):
        axis = axis_of(rank, 2, bits)
        layer, x = split_layer(whole.float(), axis).bfloat16(), inputs(rank, 1, 5 + rank).bfloat16()
        y = layer(x.requires_grad_())
        y.sum().backward()
        results.append(torch.cat((y, x.grad)))
    assert torch.equal(*results)
    (out, back), (out_again, back_again) = copy_bytes(config, torch.bfloat16, 2, bits)
    mine, relayed = needed[0][rank], needed[0][(rank + 2) % SIZE]
    across = mine * (out + out_again) + relayed * (back + back_again) + COUNT_BYTES
    neighbour = rank ^ 1
    row, rows = 2 * config.hidden_size, needed[1][rank, neighbour] + needed[1][neighbour, rank]
    assert [
        copy_bytes(replace(config, num_experts=n), torch.bfloat16, 2, bits)[0][0] - out
        for n in (256, 258)
    ] == [0, 3]  # ids in one byte, or two
    assert axis.group.ledger.sent == {
        **Traffic(AXES).sent,
        ("expert", "across_nodes"): across,
        ("expert", "in_node"): 2 * rows * row + 2 * torch.int64.itemsize,
    }


@ranks(SIZE)
def test_codes_round_what_crosses_towards_experts_alone() -> None:
    """Of 256 codes for a row's largest element, each is off by at most half: 1/2 / 127, and bf16's
    truncated scales take 2^-8 more. A token whose experts are in its node is exact."""
    rank, config = dist.get_rank(), replace(EXPERTS, moe_router_topk=1, moe_router_pre_softmax=True)
    whole, x = layer_of(config), inputs(rank, 1, 16)
    found, exact = (
        split_layer(whole, axis_of(rank, 2, bits))(x).detach().flatten(0, 1) for bits in (8, 16)
    )
    nodes = whole.router.choose(whole.router(x.flatten(0, 1))).flatten() // 4
    is_here = nodes == rank // 2
    assert torch.equal(found[is_here], exact[is_here]) and 0 < is_here.sum() < 16
    error = (found - exact)[~is_here].norm() / exact[~is_here].norm()
    assert 0 < error < 0.02


@ranks(SIZE)
def test_an_infinite_gradient_reaches_the_loss_scaler_as_codes() -> None:
    rank, x = dist.get_rank(), inputs(dist.get_rank(), 1, 4).requires_grad_()
    layer, gradient = split_layer(layer_of(EXPERTS), axis_of(rank, 2, 8)), torch.ones(1, 4, 32)
    gradient[0, 0, 3] = torch.inf if rank == 0 else 1.0
    layer(x).backward(gradient)
    assert x.grad.isfinite().all(2)[0].tolist() == [rank != 0, True, True, True]


def test_copies_are_those_of_random_choices() -> None:
    """10,000 draws of about 1 each have a mean that is off by less than 4 of its deviations, each
    at most (m - 1) / 2 / 100."""
    generator = torch.Generator().manual_seed(1)
    for experts, topk, nodes in ((8, 1, 2), (8, 3, 2), (16, 4, 4), (128, 8, 2), (64, 6, 8)):
        chosen = torch.rand(10_000, experts, generator=generator).topk(topk).indices
        there = (chosen // (experts // nodes))[..., None] == torch.arange(1, nodes)
        counted = there.any(1).sum(1).float().mean().item()
        foretold = copies_across_nodes(experts, topk, nodes)
        assert counted == pytest.approx(foretold, abs=4 * (nodes - 1) / 200)
    assert copies_across_nodes(8, 8, 4) == 3 and copies_across_nodes(8, 1, 2) == 0.5
