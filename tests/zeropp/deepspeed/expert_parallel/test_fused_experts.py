"""Experts are found by what they hold; those that ranks cannot split are refused by name."""

from collections.abc import Callable

import peft
import pytest
import torch
from torch import nn
from transformers import Llama4ForCausalLM, Llama4TextConfig

import zeropp
from tests.zeropp.deepspeed.expert_parallel.mixtures import config_of, mixture
from zeropp import InputError
from zeropp.deepspeed.expert_parallel.fused_experts import find_experts
from zeropp.sharding.checks import require_attachable_settings


class Experts(nn.Module):
    """Experts of a program of its own."""

    def __init__(self, num_experts: int = 4) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.gate_up_proj = nn.Parameter(torch.zeros(num_experts, 6, 5))
        self.down_proj = nn.Parameter(torch.zeros(num_experts, 5, 3))

    def forward(self, x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


def with_norm() -> nn.Module:
    experts = Experts()
    experts.norm = nn.LayerNorm(5)
    return experts


def with_hook() -> nn.Module:
    experts = Experts()
    experts.register_forward_hook(lambda *_: None)
    return experts


def with_buffer() -> nn.Module:
    experts = Experts()
    experts.register_buffer("limits", torch.zeros(4, 2))
    return experts


def shared() -> nn.Module:
    experts = Experts()
    return nn.ModuleList([nn.Sequential(experts), nn.Sequential(experts)])


def tied() -> nn.Module:
    blocks = [Experts(), Experts()]
    blocks[1].down_proj = blocks[0].down_proj
    return nn.ModuleList(blocks)


def adapted() -> nn.Module:
    names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], target_parameters=names)
    return peft.get_peft_model(mixture("qwen3_moe"), config)


def without_routing() -> nn.Module:
    """Experts that get all tokens sorted already."""
    config = Llama4TextConfig(
        vocab_size=31,
        hidden_size=16,
        intermediate_size=8,
        intermediate_size_mlp=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
        num_local_experts=4,
        moe_layers=[0],
    )
    return Llama4ForCausalLM(config)


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_experts_of_transformers_are_found(family: str) -> None:
    found = find_experts(mixture(family), 2)
    assert [*found] == [f"model.layers.{i}.mlp.experts" for i in range(2)]


def test_experts_of_other_programs_are_found() -> None:
    model = nn.ModuleList([nn.Linear(2, 2), nn.Sequential(Experts(6))])
    assert find_experts(model, 3) == {"1.0": model[1][0]}


@pytest.mark.parametrize(
    "build, text",
    [
        (lambda: nn.Linear(2, 2), "Linear has no experts that can be split"),
        (without_routing, "Llama4ForCausalLM has no experts that can be split"),
        (lambda: nn.Sequential(Experts(5)), "0 has 5 experts: choose a number"),
        (lambda: nn.Sequential(with_norm()), r"norm.weight of shape \[5\]"),
        (lambda: nn.Sequential(with_hook()), "0 has hooks"),
        (lambda: nn.Sequential(with_buffer()), "0 has buffers"),
        (shared, "0.0, 1.0 share parameters"),
        (tied, "0, 1 share parameters"),
        (adapted, "base_layer has adapters"),
    ],
)
def test_what_cannot_be_split_is_refused(build: Callable[[], nn.Module], text: str) -> None:
    with pytest.raises(InputError, match=text):
        find_experts(build(), 2)


def test_keys_that_would_change_the_router_are_refused() -> None:
    experts = {"enabled": True, "autoep_size": 2}
    for name, value in (("load_balance_coeff", 1e-3), ("num_expert_groups", 2)):
        json = config_of(1) | {"expert_parallel": {**experts, name: value}}
        with pytest.raises(InputError, match=f"{name} = .*: the router is the model's own"):
            zeropp.ZeroConfig.from_json(json)
    config = zeropp.ZeroConfig.from_json(
        config_of(1) | {"expert_parallel": {**experts, "load_balance_coeff": None, "top_k": "auto"}}
    )
    assert config.expert_ranks == 2


def test_attach_says_what_to_use() -> None:
    with pytest.raises(InputError, match="DistributedConfig"):
        require_attachable_settings(zeropp.ZeroConfig.from_json(config_of(2)))
