"""Experts that ranks split: their data axis, divisor, norm and bytes, against one process."""

import functools

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.ranks import ranks
from tests.zeropp.prescribed_gradients import ALL_THREE, data_mesh, zero_config
from tests.zeropp.sharding.expert_model import VOCAB_SIZE, ExpertModel, expert_mesh
from tests.zeropp.small_model import whole
from zeropp import InputError, Sharding, ZeroConfig, optimizer_step, shard

WORLD, EXPERTS, STEPS = 4, 8, 2


def tokens_of(step: int, num_micro_batches: int) -> list[list[torch.Tensor]]:
    """Tokens [2, 7] of each micro-batch of each rank."""
    generator = torch.Generator().manual_seed(step)
    shape = WORLD, num_micro_batches, 2, 7
    return [list(rank) for rank in torch.randint(0, VOCAB_SIZE, shape, generator=generator)]


def sharded(size: int, config: ZeroConfig, *, whole: bool = False) -> Sharding:
    """A sharded model; with `whole`, its experts are split by `shard`, not before."""
    mesh = expert_mesh(size)
    model = ExpertModel(EXPERTS, mesh, whole=whole)
    return shard(model, data_mesh(), config, experts=dict.fromkeys(model.experts, mesh))


def all_of_it(**settings: object) -> ZeroConfig:
    """ZeRO++ with steps of codes on two nodes, in bf16."""
    zeropp = {"weight_steps": True, **settings}
    return zero_config(ALL_THREE, ranks_per_node=2, zeropp=zeropp, bf16={"enabled": True})


def train(sharding: Sharding, batches: list[list[list[torch.Tensor]]]) -> list[float]:
    """The norms of the gradients of some steps of AdamW; `batches` has the ranks' of each step."""
    optimizer = torch.optim.AdamW(sharding.model.parameters(), lr=1e-2, eps=1e-4)
    norms = []
    for step in batches:
        own = step[dist.get_rank()]
        for index, tokens in enumerate(own):
            with sharding.micro_step(last=index == len(own) - 1):
                (sharding.model(tokens) / len(own)).backward()
        norms.append(optimizer_step(optimizer, sharding, clip_grad=0.5).grad_norm)
    return norms


@functools.cache
def train_alone(num_micro_batches: int) -> tuple[list[float], ExpertModel]:
    """The norms and the model of one process, which trains once for all tests of a rank."""
    torch.manual_seed(0)
    model = ExpertModel(EXPERTS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    norms = []
    for step in (tokens_of(number, num_micro_batches) for number in range(STEPS)):
        for tokens in (each for rank in step for each in rank):
            (model(tokens) / (WORLD * len(step[0]))).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
    return norms, model


@pytest.mark.parametrize(
    ("size", "stage", "num_micro_batches"),  # all pairs
    [(2, 0, 3), (4, 0, 1), (2, 1, 1), (4, 1, 3), (2, 2, 3), (4, 2, 1), (2, 3, 1), (4, 3, 3)],
)
@ranks(WORLD)
def test_split_experts_train_as_one_process_does(
    size: int, stage: int, num_micro_batches: int
) -> None:
    batches = [tokens_of(step, num_micro_batches) for step in range(STEPS)]
    config = zero_config({"stage": stage}, ranks_per_node=2)
    sharding = sharded(size, config, whole=stage in (0, 3))
    norms = train(sharding, batches)
    expected, alone = train_alone(len(batches[0][0]))
    torch.testing.assert_close(norms, expected, rtol=1e-5, atol=0)
    for (name, own), other in zip(
        sharding.model.named_parameters(), alone.parameters(), strict=True
    ):
        # An Adam step is at most the learning rate, times the relative error of its gradient.
        torch.testing.assert_close(whole(own.detach()), other, rtol=0, atol=1e-5, msg=name)


@pytest.mark.parametrize("size", [2, 4])
@ranks(WORLD)
def test_what_split_experts_send_is_what_was_planned(size: int) -> None:
    batches = [tokens_of(step, 2) for step in range(STEPS)]
    weights = []
    for coded in (False, True):
        sharding = sharded(size, all_of_it(code_messages=coded))
        train(sharding, batches[:1])
        sharding.traffic.take()
        train(sharding, batches[1:2])
        sent = sharding.traffic.take()
        if not coded:
            assert sent == sharding.expected_traffic(2)
        weights.append([parameter.to_local() for parameter in sharding.model.parameters()])
    assert all(map(torch.equal, *weights))
    experts = [unit for unit in sharding.plan.units if unit.axis is not sharding.plan.axis]
    assert [unit.axis.num_losses for unit in experts] == [WORLD, WORLD]
    assert [unit.axis.nodes.num_ranks for unit in experts] == [WORLD // size] * 2


@pytest.mark.parametrize(
    ("size", "settings"),
    [
        (2, {"fp16": {"enabled": True}}),
        (4, {"zeropp": {"reduce_gradients_once": True}}),
        (2, {"zeropp": {"reduce_gradients_once": True}}),
        (2, {"offload_optimizer": {"device": "cpu"}}),
        (4, {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}),
    ],
)
@ranks(WORLD)
def test_split_experts_with(size: int, settings: dict) -> None:
    zero = {"stage": 3} | {key: each for key, each in settings.items() if key.startswith("off")}
    rest = {key: each for key, each in settings.items() if not key.startswith("off")}
    batches = [tokens_of(step, 2) for step in range(STEPS)]
    sharding = sharded(size, zero_config(zero, ranks_per_node=2, **rest))
    norms = train(sharding, batches)
    expected, _ = train_alone(len(batches[0][0]))
    is_half = "fp16" in settings
    torch.testing.assert_close(norms, expected, rtol=2**-8 if is_half else 1e-5, atol=0)


@ranks(WORLD)
def test_experts_that_do_not_fit_are_refused() -> None:
    mesh, data = expert_mesh(2), data_mesh()
    split = ExpertModel(EXPERTS, mesh)
    odd = ExpertModel(EXPERTS)
    odd.experts[1].up = torch.nn.Parameter(torch.zeros(9, 16))
    crossed = init_device_mesh("cpu", (2, 2), mesh_dim_names=("expert", "expert_data"))
    for model, modules, settings, text in (
        (odd, dict.fromkeys(odd.experts, mesh), {"stage": 3}, "shape .9, 16., and 2 ranks"),
        (split, {split.blocks[0]: mesh}, {"stage": 3}, "is not inside a unit"),
        (split, dict.fromkeys(split.experts, data), {"stage": 3}, "a mesh of 1 axes"),
        (split, dict.fromkeys(split.experts, crossed), {"stage": 3}, "is not split over"),
    ):
        with pytest.raises(InputError, match=text):
            shard(model, data, zero_config(settings, ranks_per_node=2), experts=modules)
