"""Experts are found by what they hold; a layer that ranks split computes what they do."""

import copy
from collections.abc import Callable

import peft
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import (
    DeepseekV3Config,
    GptOssConfig,
    Llama4ForCausalLM,
    Llama4TextConfig,
    NemotronHConfig,
)
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Experts
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts

import zeropp
from tests.ranks import ranks
from tests.zeropp.deepspeed.expert_parallel.mixtures import config_of, mixture
from zeropp import InputError
from zeropp.deepspeed.expert_parallel.layer import ExpertParallel, ExpertRanks
from zeropp.deepspeed.expert_parallel.split_experts import find_experts
from zeropp.sharding.checks import require_attachable_settings
from zeropp.sharding.own_meshes import parts_of, replace_by_parts
from zeropp.wire.rank_group import AXES, Nodes, RankGroup
from zeropp.wire.traffic import Traffic

EXPERTS, HIDDEN, TOP_K = 4, 16, 2


def experts_of(family: str) -> nn.Module:
    """A module of random experts: gated, with biases and transposed, or not gated."""
    torch.manual_seed(2)
    if family == "deepseek_v3":
        config = DeepseekV3Config(hidden_size=HIDDEN, moe_intermediate_size=8)
        config.num_local_experts = config.n_routed_experts = EXPERTS
        module = DeepseekV3Experts(config)
    elif family == "gpt_oss":
        config = GptOssConfig(
            hidden_size=HIDDEN, intermediate_size=8, num_local_experts=EXPERTS, head_dim=4
        )
        module = GptOssExperts(config)
    else:
        config = NemotronHConfig(
            hidden_size=HIDDEN, moe_intermediate_size=8, n_routed_experts=EXPERTS
        )
        module = NemotronHExperts(config)
    config._experts_implementation = "eager"
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)
    return module


def choices(case: str, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, indices and weights of a rank."""
    generator = torch.Generator().manual_seed(rank)
    num = {"no tokens on a rank": 5 * (rank == 0), "no tokens": 0}.get(case, 3 + rank)
    x = torch.randn(num, HIDDEN, generator=generator)
    index = torch.rand(num, EXPERTS, generator=generator).argsort(1)[:, :TOP_K]
    if case == "one expert":
        index = torch.full_like(index, 1)
        index[:, 1] = EXPERTS  # no second one
    return x, index, torch.rand(num, TOP_K, generator=generator)


def split_layer(module: nn.Module) -> ExpertParallel:
    size, rank = dist.get_world_size(), dist.get_rank()
    mesh = init_device_mesh("cpu", (1, size), mesh_dim_names=("expert_data", "expert"))
    nodes = Nodes(num_ranks=size, ranks_per_node=size)
    peers = RankGroup(
        members=tuple(range(size)), position=rank, nodes=nodes, purpose="expert",
        ledger=Traffic(AXES), group=mesh.get_group("expert"),
    )  # fmt: skip
    layer = ExpertParallel(module, ExpertRanks(peers))
    replace_by_parts([layer], parts_of({layer: mesh}))
    return layer


def with_penalty(y: Tensor, x: Tensor) -> Tensor:
    """A loss with the gradient of y, which is to be differentiated again."""
    loss = y.square().sum()
    if y.requires_grad:  # not so for whole modules without tokens
        (slope,) = torch.autograd.grad(y.sin().sum(), x, create_graph=True)
        loss = loss + 0.01 * slope.square().sum()
    return loss


@pytest.mark.parametrize("case", ["any", "one expert", "no tokens on a rank", "no tokens"])
@pytest.mark.parametrize("family", ["deepseek_v3", "gpt_oss", "nemotron_h"])
@ranks(2)
def test_outputs_and_gradients_are_those_of_the_whole_module(family: str, case: str) -> None:
    rank, module = dist.get_rank(), experts_of(family)
    layer = split_layer(copy.deepcopy(module))
    total = [torch.zeros_like(each) for each in module.parameters()]
    for other in range(2):
        inputs = choices(case, other)
        if case == "one expert":  # whole modules take a choice of no expert only in some families
            index = inputs[1].clamp(max=EXPERTS - 1)
            inputs = inputs[0], index, inputs[2] * (inputs[1] < EXPERTS)
        tensors = [inputs[0].requires_grad_(), inputs[2].detach().requires_grad_()]
        y = module(tensors[0], inputs[1], tensors[1])
        gradients = torch.autograd.grad(
            with_penalty(y, tensors[0]) + 0 * sum(each.sum() for each in module.parameters()),
            [*tensors, *module.parameters()],
            allow_unused=True,
        )
        for sum_, gradient in zip(total, gradients[2:], strict=True):
            sum_ += gradient
        if other == rank:
            wanted, of_inputs = y, gradients[:2]
    x, index, weights = choices(case, rank)
    x.requires_grad_()
    weights.requires_grad_()
    y = layer(x, index, weights)
    torch.testing.assert_close(y, wanted)
    assert y._base is None  # of a view that is changed in place, FSDP2 would lose the hooks
    with_penalty(y, x).backward()
    if of_inputs[0] is not None:
        torch.testing.assert_close(x.grad, of_inputs[0])
        chosen = index < EXPERTS
        torch.testing.assert_close(weights.grad[chosen], of_inputs[1][chosen])
    for (name, own), expected in zip(layer.named_parameters(), total, strict=True):
        assert isinstance(own.grad, DTensor), name
        torch.testing.assert_close(own.grad.full_tensor(), expected)


@ranks(2)
def test_what_calls_it_may_name_arguments_and_copies_are_whole() -> None:
    module = experts_of("deepseek_v3")
    layer = split_layer(copy.deepcopy(module))
    x, index, weights = choices("any", 0)
    wanted = module(x, index, weights)
    named = layer(hidden_states=x, top_k_weights=weights, top_k_index=index)
    torch.testing.assert_close(named, wanted)
    alone = ExpertParallel(module, ExpertRanks(None))
    assert torch.equal(copy.deepcopy(alone)(x, index, weights), wanted)
    assert alone.state_dict().keys() == module.state_dict().keys()


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
