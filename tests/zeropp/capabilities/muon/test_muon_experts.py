"""Muon on models whose experts are stacks of matrices [E, m, n], against an fp64 reference."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import GptOssConfig, GptOssForCausalLM, PreTrainedModel

import zeropp
from tests.ranks import ranks
from tests.zeropp.deepspeed.expert_parallel.mixtures import (
    CLIP,
    VOCAB_SIZE,
    config_of,
    loss_of,
    mixture,
    parts_of,
    run,
)
from tests.zeropp.deepspeed.small_engine import logged
from zeropp import Engine, ZeroConfig
from zeropp.capabilities.muon.groups import groups_of, stacks_of
from zeropp.capabilities.muon.matrix_step import MuonOptions
from zeropp.capabilities.muon.muon import Muon
from zeropp.deepspeed.utils import safe_get_full_fp32_param

LR, MOMENTUM, STEPS = 0.02, 0.95, 2
TRANSPOSED = ("gpt_oss",)


def model_of(family: str, num_experts: int) -> PreTrainedModel:
    """A small model; experts of GPT-OSS have inputs as rows, and biases [E, m]."""
    if family != "gpt_oss":
        return mixture(family, num_experts)
    torch.manual_seed(7)
    config = GptOssConfig(
        vocab_size=VOCAB_SIZE, hidden_size=32, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_local_experts=num_experts,
        num_experts_per_tok=2, layer_types=["full_attention"] * 2, attention_dropout=0.0,
    )  # fmt: skip
    return GptOssForCausalLM(config).float()


def orthogonal(matrix: Tensor) -> Tensor:
    """Newton-Schulz iterations of one matrix in fp64."""
    x = matrix.double()
    x = x / x.norm()
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x


def is_muons(name: str, parameter: Tensor) -> bool:
    return ".layers." in name and parameter.ndim >= 2 and not name.endswith("_bias")


def train_alone(model: nn.Module, family: str, world: int) -> dict[str, Tensor]:
    """The weights after some steps in one process; products and updates are in fp64."""
    named = dict(model.named_parameters())
    momenta = {name: 0.0 for name, each in named.items() if is_muons(name, each)}
    adam = torch.optim.AdamW(
        [named[name] for name in named.keys() - momenta], lr=LR, weight_decay=0
    )
    for step in range(STEPS):
        batches = [each for rank in parts_of(step, 1, world) for each in rank]
        for tokens in batches:
            (loss_of(model, tokens) / len(batches)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        for name in momenta:
            gradient = named[name].grad.double()
            momenta[name] = MOMENTUM * momenta[name] + (1 - MOMENTUM) * gradient
            ahead = gradient + MOMENTUM * (momenta[name] - gradient)
            for weight, direction in zip(
                named[name].detach().view(-1, *ahead.shape[-2:]),
                ahead.view(-1, *ahead.shape[-2:]),
                strict=True,
            ):
                sides = weight.shape[::-1] if "gate_up" in name or "down_proj" in name else 0
                rows, columns = sides if sides and family in TRANSPOSED else weight.shape
                weight -= LR * max(1.0, rows / columns) ** 0.5 * orthogonal(direction)
        adam.step()
        model.zero_grad()
    return {name: each.detach() for name, each in named.items()}


@pytest.mark.parametrize(
    ("family", "experts", "first", "second"),  # ZeRO stages, and ranks that split experts
    [
        ("qwen3_moe", 6, (0, 1), (3, 2)),  # of two ranks three experts, which are cut
        ("gpt_oss", 6, (2, 1), (1, 2)),  # three ranks have experts
        ("gpt_oss", 4, (0, 2), (2, 4)),
        ("mixtral", 4, (1, 4), (0, 2)),
    ],
)
@ranks(4)
def test_each_expert_is_a_matrix_by_itself(family, experts, first, second, tmp_path):
    """A checkpoint goes on at another stage and with other ranks that split experts.

    Iterations multiply the smallest singular values, and rounding errors beside them, by a.
    """
    alone = model_of(family, experts)
    expected = train_alone(copy.deepcopy(alone), family, dist.get_world_size())
    for step, (stage, size) in enumerate((first, second)):
        engine = engine_of(copy.deepcopy(alone), stage, size)
        if step:
            engine.load_checkpoint(tmp_path)
        run(engine, 1, step)
        engine.save_checkpoint(tmp_path)
    tolerance = STEPS * LR * 2**0.5 * 3.4445**5 * 2**-22
    for name, parameter in engine.module.named_parameters():
        weight = safe_get_full_fp32_param(parameter)
        torch.testing.assert_close(weight, expected[name], rtol=1e-5, atol=tolerance, msg=name)


def engine_of(model: PreTrainedModel, stage: int, size: int) -> Engine:
    """An engine with Muon, whose products are in fp32, of whole matrices."""
    config = config_of(size, stage) | {"optimizer": {}}

    def optimizer(parameters: list[Tensor]) -> Muon:
        options = MuonOptions(dtype=torch.float32, blocks="whole")
        return Muon(
            groups_of(model, parameters), lr=LR, weight_decay=0.0, momentum=MOMENTUM,
            options=options, config=ZeroConfig.from_json(config), parts=stacks_of(model),
        )  # fmt: skip

    return zeropp.initialize(model=model, optimizer=optimizer, config=config)[0]


@ranks(2)
def test_the_json_says_who_updates_what_at_which_rate():
    """All of a program's parameters, without `use_muon`; a convolution is AdamW's, with a line."""
    model = model_of("gpt_oss", 4)
    model.model.layers[0].conv = nn.Conv1d(4, 4, 3)
    params = {"lr": 1e-2, "muon_lr": 0.03, "adam_lr": 1e-3, "ns_steps": 4, "ns_method": "gram"}
    config = config_of(1, 2) | {"optimizer": {"type": "Muon", "params": params}}
    bias = {"params": [model.lm_head.weight], "weight_decay": 0.1, "lr": 1e-4}
    others = [each for each in model.parameters() if each is not model.lm_head.weight]
    with logged() as lines:
        engine, optimizer, *_ = zeropp.initialize(
            model=model, model_parameters=[*others, bias], config=config
        )
    with engine.sharding.as_shards():
        names = {each: name for name, each in model.named_parameters()}
    rates = {
        names[each]: group["lr"] for group in optimizer.param_groups for each in group["params"]
    }
    for name, parameter in model.named_parameters():
        wanted = 0.03 if is_muons(name, parameter) and ".conv." not in name else 1e-3
        assert rates[name] == (1e-4 if name == "lm_head.weight" else wanted), name
    assert optimizer.param_groups[0]["ns_steps"] == 4
    assert any("model.layers.0.conv.weight" in line for line in lines)
    assert "Muon: 14 parameters at lr 0.03" in lines
